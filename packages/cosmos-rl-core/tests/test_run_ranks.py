"""A policy replica of several ranks: the words between them, how their end is told, and whole runs."""

import asyncio
import json
from datetime import timedelta

import numpy as np
import pytest

from cosmos_rl_core import run
from cosmos_rl_core.control import protocol as p
from cosmos_rl_core.control.address_file import ControllerFile
from cosmos_rl_core.errors import UserError
from cosmos_rl_core.parallel.config import ParallelSection, PolicySection
from cosmos_rl_core.wire.channel import ConnectionClosed
from cosmos_rl_core.workers.failure import Failure, cause
from cosmos_rl_core.workers.node import Node, WorkerAddress, from_arguments, policy_node, to_arguments
from doubles.ranks import run_ranks


def recipe(tmp_path, name, **policy):
    return {
        "run": {
            "domain": "cosmos_rl_core.testing.tiny:TINY",
            "name": "tiny",
            "output_dir": str(tmp_path / name),
            "max_steps": 6,
        },
        "algorithm": {"name": "grpo"},
        "policy": {"prompts_per_step": 5, "threads": 1, "optimizer": {"learning_rate": 0.1}, **policy},
        "rollout": {"group_size": 4, "threads": 1, "sampling": {"max_tokens": 3}},
        "reward": {"functions": [{"name": "hits"}]},
        "sync": {"backend": "cosmos_rl_core.testing.file_sync:FileSync", "max_staleness": 0},
        "logging": {"sinks": ["jsonl"]},
    }


def weights_of(checkpoint):
    """The bandit's weights out of a checkpoint of any layout."""
    from cosmos_rl_core.checkpoint.restore import load_weights
    from cosmos_rl_core.parallel.setup import ModelSetup
    from cosmos_rl_core.testing.tiny_model import TinyPolicy
    from cosmos_rl_core.testing.tiny_task import TinyModel

    policy = TinyPolicy(TinyModel(), temperature=1.0, setup=ModelSetup())
    load_weights(checkpoint, policy.weights())
    return {name: tensor.detach().numpy() for name, tensor in policy.weights().items()}


def test_shards_that_are_not_there_cannot_be_offloaded(tmp_path):
    with pytest.raises(UserError, match="parameter_offload = true: needs a replica of several ranks"):
        run(recipe(tmp_path, "alone", memory={"parameter_offload": True}))


@pytest.mark.ci
def test_two_ranks_train_as_one_process_does(tmp_path):
    alone = run(recipe(tmp_path, "alone"))
    spread = run(recipe(tmp_path, "spread", parallel={"dp_shard": 2}), ["rollout.spool.threshold_bytes=0"])
    assert [line["reward_mean"] for line in spread.metrics] == [line["reward_mean"] for line in alone.metrics]
    np.testing.assert_allclose(
        [line["grad_norm"] for line in spread.metrics], [line["grad_norm"] for line in alone.metrics], rtol=1e-4
    )
    assert all(line["spooled_bytes"] > 0 for line in spread.metrics), "each rank reads the groups itself"
    expected = weights_of(alone.checkpoint)
    for name, tensor in weights_of(spread.checkpoint).items():
        np.testing.assert_allclose(tensor, expected[name], atol=1e-5)
    processes = {event["args"]["name"] for event in timeline(spread.run_dir) if event["name"] == "process_name"}
    assert {"policy-0 rank 0", "policy-0 rank 1"} <= processes


def timeline(run_dir):
    return json.loads((run_dir / "timeline.json").read_text())["traceEvents"]


def test_several_ranks_want_processes(tmp_path):
    tables = recipe(tmp_path, "inline", parallel={"dp_shard": 2})
    with pytest.raises(UserError, match=r'placement = "inline" has one process, but .* needs 2 ranks'):
        run(tables, ["run.placement=inline"])


# -- which machine holds what


def test_the_axes_say_how_many_ranks_a_machine_has():
    section = PolicySection(num_nodes=2, parallel=ParallelSection(dp_shard=4, tp=2))
    node = policy_node(section, bind="127.0.0.1")
    assert (node.index, node.num_nodes, node.ranks_per_node, node.num_ranks) == (0, 2, 4, 8)
    assert node.rendezvous.startswith("127.0.0.1:")
    assert policy_node(PolicySection(), bind="127.0.0.1") == Node()


def test_ranks_that_do_not_divide_over_the_machines_are_an_error():
    section = PolicySection(num_nodes=3, parallel=ParallelSection(dp_shard=4))
    with pytest.raises(UserError, match=r"num_nodes = 3 does not divide the 4 ranks of .* \(dp_shard 4\)"):
        policy_node(section, bind="127.0.0.1")


def test_an_address_of_another_machine_is_refused():
    with pytest.raises(UserError, match=r"cannot listen on tcp://192.0.2.1:0: "):
        policy_node(PolicySection(num_nodes=2, ranks_per_node=1), bind="192.0.2.1")


def test_the_command_for_another_machine_says_all_it_needs(tmp_path):
    node = Node(num_nodes=3, ranks_per_node=4, rendezvous="10.0.0.1:4000", collective_timeout_s=60)
    worker = WorkerAddress(
        controller="tcp://10.0.0.1:5000", role="policy", name="policy-0", token_file=tmp_path / "my token", threads=8
    )
    commands = node.commands_for_others(worker, python_path=("recipes",), restarts=3)
    assert commands[1] == (
        "cosmos-rl worker --role policy --name policy-0 --controller tcp://10.0.0.1:5000 "
        f"--token-file '{tmp_path}/my token' --threads 8 --node 2 --num-nodes 3 --ranks-per-node 4 "
        "--collective-timeout-s 60 --restarts 3 --rendezvous 10.0.0.1:4000 --python-path recipes"
    )
    assert len(commands) == 2


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"index": 2, "num_nodes": 2, "rendezvous": "a:1"}, "--node 2: .* 2 machines"),
        ({"num_nodes": 2}, "--rendezvous"),
    ],
)
def test_a_machine_that_cannot_be_is_an_error(keys, message):
    with pytest.raises(UserError, match=message):
        Node(**keys)


def test_another_machine_finds_the_address_it_is_reached_at():
    assert Node(num_nodes=2, rendezvous="127.0.0.2:4000").address_among_machines() == "127.0.0.2"
    assert Node(index=1, num_nodes=2, rendezvous="127.0.0.1:4000").address_among_machines() == "127.0.0.1"


# -- how the end of a rank is told


def test_the_cause_is_the_earliest_failure_that_is_no_consequence():
    lost = Failure(message="Connection closed by peer", consequence=True, at=1.0)
    late, early = Failure(message="late", at=3.0), Failure(message="early", at=2.0)
    assert cause([(0, lost), (1, late), (2, early)]) == (2, early)
    assert cause([(0, lost)]) == (0, lost)


@pytest.mark.parametrize(
    ("error", "user", "consequence"),
    [
        (UserError("mend it"), True, False),
        (OSError(28, "No space left on device", "/data"), True, False),
        (ValueError("a bug"), False, False),
        (ConnectionClosed("gone"), False, True),
        (RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:4000"), False, True),
        (RuntimeError("[unbound_buffer.cc:78] Timed out waiting 2000ms for recv operation to complete"), False, True),
    ],
)
def test_an_error_is_told_from_what_follows_of_another_ones(error, user, consequence):
    failure = Failure.of(error)
    assert (failure.user, failure.consequence, failure.exit_code) == (user, consequence, 2 if user else 1)


def test_what_a_rank_writes_down_is_read_again(tmp_path):
    failure = Failure.of(UserError("row 3 is too long"))
    failure.write(tmp_path / "error.json")
    assert Failure.read(json.loads((tmp_path / "error.json").read_text())) == failure
    assert Failure.read({"message": "torch's own"}) is None


def test_a_failure_is_reported_to_the_present_controller(tmp_path):
    worker = WorkerAddress(role="policy", name="policy-0", run=tmp_path, controller="tcp://127.0.0.1:4000").resolved()
    assert worker.present_controller() == "tcp://127.0.0.1:4000", "there is no controller.json"
    ControllerFile.of_this_process("tcp://10.0.0.2:5000", generation=1).write(tmp_path)
    assert worker.present_controller() == "tcp://10.0.0.2:5000"
    [again] = from_arguments(to_arguments(worker), program="rank")[:1]
    assert again.present_controller() == "tcp://10.0.0.2:5000", "in the ranks too"


# -- the words between ranks

MESH = p.Remesh(epoch=1, members=("policy-0",), version=3, lineage=0)
BATCH = p.Batch(step=3, epoch=1, samples=(7, 8), payloads=[b"x" * 100_000, b""])


def relay(rank, world_size):
    """Rank 0 broadcasts, the others receive and act."""
    from concurrent.futures import ThreadPoolExecutor

    import torch.distributed as dist

    from cosmos_rl_core.observe.trace import Timeline
    from cosmos_rl_core.parallel.rank_group import RankGroup
    from cosmos_rl_core.types import StepResult
    from cosmos_rl_core.workers.ranks import Ranks
    from cosmos_rl_core.workers.steps import PolicyLink, PolicySteps

    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=30))
    ranks = Ranks(RankGroup(group), group, ThreadPoolExecutor(1), dist.HashStore())
    seen = []

    class Replica:
        async def batch(self, message):
            seen.append(message)
            return message

        async def finish_step(self, message):
            seen.append(message)

        async def join(self, message):
            assert message == MESH
            return 3

        async def before_step(self, step):
            pass

        async def idle(self):
            pass

        after_steps = written = idle

    async def lead():
        for message in (MESH, BATCH, p.Committed(3, 9, (8,)), p.Stop(reason="over"), p.Stop(reason="gone")):
            await ranks.broadcast(message)

    async def follow():
        steps = PolicySteps(PolicyLink(None, ranks), Replica(), Timeline(process="policy"))
        assert await steps.next_batch(3) == BATCH
        await steps.commit(3)
        await steps.report(StepResult(policy_version=4, metrics={}), {})
        assert await steps.next_batch(4) is None
        with pytest.raises(ConnectionClosed, match="before step 4 was committed"):
            await steps.commit(4)

    asyncio.run(follow() if rank else lead())
    return {"received": len(seen), "committed": seen[1].next_sample if rank else -1}


def test_followers_act_on_what_the_lead_relays():
    lead, *followers = run_ranks(relay, 3)
    assert lead["received"] == 0
    assert [(int(f["received"]), int(f["committed"])) for f in followers] == [(2, 9), (2, 9)]

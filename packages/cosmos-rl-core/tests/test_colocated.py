"""Engine and policy in turns: who is awake, what memory they have, and which recipes may do so."""

import asyncio

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from cosmos_rl_core.errors import UserError
from cosmos_rl_core.gpu_time import RankGpuTime, RolloutGpuTime
from cosmos_rl_core.launch.check import check
from cosmos_rl_core.launch.gpus import GpuSupply, assign_gpus
from cosmos_rl_core.parallel.dims import ParallelDims
from cosmos_rl_core.parallel.offload.swap import Swap
from cosmos_rl_core.recipe.load import load_config
from cosmos_rl_core.rollout.colocated import ColocatedEngine
from cosmos_rl_core.settings.base import ConfigError
from cosmos_rl_core.types import Prompt, Sampling
from doubles.fake_ranks import fake_rank
from doubles.pretend_cuda import pretend_cuda

LIMIT_S = 60.0
PROMPT = Prompt(sample_id=0, row={})


class Engine:
    """Answers when it may; notes how often it slept."""

    def __init__(self):
        self.version, self.progress, self.log = 0, 0, []
        self.may_answer = asyncio.Event()
        self.may_wake = asyncio.Event()
        self.may_wake.set()
        self.is_awake = False

    def weights(self):
        return {}

    async def generate(self, prompt, *, num_samples, sampling, seed):
        assert self.is_awake
        await self.may_answer.wait()
        assert self.is_awake
        return "", []

    async def switch(self, version, apply):
        assert self.is_awake
        apply()
        self.version = version

    async def sleep(self):
        self.is_awake = False
        await asyncio.sleep(0)
        self.log.append("sleep")

    async def wake(self):
        await self.may_wake.wait()
        self.is_awake = True
        self.log.append("wake")

    async def close(self):
        self.log.append("close")


def in_turns(work, tmp_path):
    """Run `work(engine, colocated, rank)` beside the engine's turns; the policy is idle at first."""

    async def run():
        engine, rank = Engine(), RankGpuTime(tmp_path, 0)
        await rank.take()
        rank.give()
        colocated = ColocatedEngine(engine, RolloutGpuTime(tmp_path, ranks=1))
        turns = asyncio.create_task(colocated.share_gpu_time())
        working = asyncio.create_task(work(engine, colocated, rank))
        done, _ = await asyncio.wait([turns, working], timeout=LIMIT_S, return_when=asyncio.FIRST_COMPLETED)
        turns.cancel()
        await asyncio.gather(turns, return_exceptions=True)
        assert working in done, "a deadlock, or the turns ended"
        working.result()
        await colocated.close()
        rank.close()
        return engine

    return asyncio.run(run())


def answer(colocated):
    return asyncio.create_task(colocated.generate(PROMPT, num_samples=1, sampling=Sampling(max_terms=1), seed=0))


def test_an_engine_finishes_its_work_before_the_policys_turn(tmp_path):
    async def work(engine, colocated, rank):
        await colocated.switch(1, lambda: None)
        answers = [answer(colocated), answer(colocated)]
        taking = asyncio.create_task(rank.take())
        await asyncio.sleep(0.05)
        assert not taking.done()
        engine.may_answer.set()
        await asyncio.gather(*answers)
        await taking
        assert engine.log == ["wake", "sleep"]

    in_turns(work, tmp_path)


def test_an_engine_without_work_stays_awake_until_the_policy_wants_its_turn(tmp_path):
    async def work(engine, colocated, rank):
        engine.may_answer.set()
        await answer(colocated)
        await asyncio.sleep(0.05)
        await answer(colocated)
        assert engine.log == ["wake"]
        await rank.take()
        assert engine.log == ["wake", "sleep"]

    in_turns(work, tmp_path)


def test_work_during_the_policys_turn_waits(tmp_path):
    async def work(engine, colocated, rank):
        await rank.take()
        engine.may_answer.set()
        waiting = [answer(colocated), asyncio.create_task(colocated.switch(3, lambda: None))]
        await asyncio.sleep(0.05)
        assert engine.log == [] and colocated.version == 0
        rank.give()
        await asyncio.gather(*waiting)
        assert engine.log == ["wake"] and colocated.version == 3

    in_turns(work, tmp_path)


def test_a_call_that_is_cancelled_while_the_engine_wakes_leaves_it_to_the_policy(tmp_path):
    async def work(engine, colocated, rank):
        engine.may_wake.clear()
        waiting = answer(colocated)
        await asyncio.sleep(0.05)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        taking = asyncio.create_task(rank.take())
        await asyncio.sleep(0.05)
        assert not taking.done()
        engine.may_wake.set()
        await taking
        assert engine.log == ["wake", "sleep"]

    in_turns(work, tmp_path)


def test_a_switch_between_two_turns_is_made_at_once_after_the_policys(tmp_path):
    """Both want their turn over and over: each step of the policy is followed by a switch."""

    async def work(engine, colocated, rank):
        for version in range(20):
            await rank.take()
            rank.give()
            await colocated.switch(version, lambda: None)
        assert colocated.version == 19
        assert engine.log.count("wake") >= 20

    in_turns(work, tmp_path)


@pytest.mark.cuda_dry
def test_swapped_tensors_have_no_memory_and_come_back_with_their_values():
    with pretend_cuda() as record:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 7)).to("cuda")
        model[1].weight = model[0].weight  # tied
        whole = torch.arange(12.0, device="cuda")
        view = whole[4:8].view(2, 2)
        before = {name: weight.detach().cpu() for name, weight in model.named_parameters()}
        swap = Swap(lambda: [*model.parameters(), view])
        swap.out()
        assert all(weight.untyped_storage().nbytes() == 0 for weight in (*model.parameters(), whole))
        host = swap.readable({**dict(model.named_parameters()), "view": view, "other": torch.ones(1)})
        assert not any(tensor.is_cuda for tensor in host.values())
        assert all(torch.equal(host[name], value) for name, value in before.items())
        assert host["view"].tolist() == [[4.0, 5.0], [6.0, 7.0]]
        swap.out()  # nothing is left to move
        swap.back()
        assert model[1].weight is model[0].weight
        assert all(torch.equal(weight.detach().cpu(), before[name]) for name, weight in model.named_parameters())
        assert torch.equal(whole.cpu(), torch.arange(12.0))
        swap.back()
        assert swap.readable({"view": view})["view"] is view
    assert not record.mismatches


@pytest.mark.cuda_dry
def test_a_rank_swaps_its_own_shards():
    with pretend_cuda() as record, fake_rank(ParallelDims(dp_shard=2)) as mesh:
        whole = torch.arange(8.0).view(4, 2)
        spec = distribute_tensor(whole, mesh.world["dp_shard"], [Shard(0)], src_data_rank=None)._spec
        shard = DTensor(whole[:2].to("cuda"), spec, requires_grad=False)
        swap = Swap(lambda: [shard])
        swap.out()
        assert shard.to_local().untyped_storage().nbytes() == 0
        host = swap.readable({"shard": shard})["shard"]
        assert isinstance(host, DTensor) and host.shape == (4, 2) and host.placements == (Shard(0),)
        assert not host.to_local().is_cuda and torch.equal(host.to_local(), whole[:2])
        swap.back()
        assert torch.equal(shard.to_local().cpu(), whole[:2])
    assert not record.mismatches


def recipe(**changes):
    tables = {
        "run": {"domain": "cosmos_rl_core.testing.tiny:TINY", "max_steps": 1, "colocate": True},
        "model": {},
        "data": {},
        "policy": {},
        "rollout": {"engine": "tiny"},
        "reward": {"functions": [{"name": "hits"}]},
        "sync": {"backend": "cosmos_rl_core.testing.file_sync:FileSync"},
    }
    for dotted, value in changes.items():
        section, _, key = dotted.partition("__")
        tables[section] = {**tables[section], key: value}
    return load_config(tables)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("run__placement", "external"),
        ("run__share_gpus", True),
        ("policy__replicas", 2),
        ("policy__num_nodes", 2),
        ("sync__max_staleness", 2),
        ("sync__staging", "in_place"),
        ("sync__transport", "cuda_ipc"),
    ],
)
def test_settings_that_contradict_turns_are_named(key, value):
    with pytest.raises(ConfigError, match=key.replace("__", r"\.") + ".*run.colocate"):
        recipe(**{key: value})


def test_supervised_training_has_nothing_to_take_turns_with():
    tables = {"run": {"domain": "cosmos_rl_core.testing.tiny:TINY", "max_steps": 1, "colocate": True}}
    with pytest.raises(ConfigError, match=r"run.colocate.*no rollouts"):
        load_config({**tables, "model": {}, "data": {}, "algorithm": {"name": "sft"}})


def test_an_engine_that_cannot_sleep_is_refused_before_the_run():
    from cosmos_rl_core.testing.tiny import Tiny

    class Sleepless(Tiny):
        def sleeping_engine(self, name, options):
            return None

    global SLEEPLESS
    SLEEPLESS = Sleepless()
    with pytest.raises(ConfigError, match="'tiny' of the tiny domain cannot free its memory"):
        check(recipe(run__domain=f"{__name__}:SLEEPLESS"))


def test_ranks_and_rollouts_have_the_same_gpus():
    config = recipe(rollout__replicas=2)
    found = assign_gpus(config, 3, gpus="0123")
    assert (found.policies, found.rollouts) == ([["0", "1", "2"]], [["0"], ["1"]])
    assert found.processes_per_gpu == 1
    assert str(found) == "policy-0 on 0,1,2, rollout-0 on 0, rollout-1 on 1, in turns; unused: 3"
    with pytest.raises(UserError, match="2 x 1 GPUs of this machine are needed for rollout replicas, but 1 is visible"):
        assign_gpus(config, 1, gpus="0")


def test_workers_that_are_added_take_turns_with_the_policy():
    supply = GpuSupply(visible=["0", "1"], per_worker={"policy": 2, "rollout": 1}, share=False, in_turns=True)
    in_use = {"policy-0": ["0", "1"], "rollout-0": ["0"]}
    assert supply.assign({"rollout": 1}, in_use=in_use) == {"rollout": [["1"]]}
    with pytest.raises(UserError, match="1 of 2 are free"):
        supply.assign({"rollout": 2}, in_use=in_use)
    with pytest.raises(UserError, match="the run has one policy"):
        supply.assign({"policy": 1}, in_use=in_use)

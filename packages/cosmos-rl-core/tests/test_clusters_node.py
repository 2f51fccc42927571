"""Roles and GPUs of the machines of `cosmos-rl node`, and what it refuses."""

import asyncio
import socket
from dataclasses import replace

import pytest

from cosmos_rl_core.errors import UserError
from cosmos_rl_core.ops.clusters.launcher import ClusterRun
from cosmos_rl_core.ops.clusters.meeting import Begin, GivenUp, Meeting, NodeJoin, Over
from cosmos_rl_core.ops.clusters.node import ClusterNode, gpus_of, parts_of
from cosmos_rl_core.wire.channel import ConnectionClosed, Hello, connect, serve

RECIPE = """
[run]
domain = "cosmos_rl_core.testing.tiny:TINY"
output_dir = "run"
max_steps = 3
[[reward.functions]]
name = "hits"
"""
TOKEN = bytes(32)


@pytest.fixture
def recipe(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COSMOS_RL_TOKEN", TOKEN.hex())
    (tmp_path / "run.toml").write_text(RECIPE)
    return lambda *overrides: ClusterRun.of(tmp_path / "run.toml", overrides)


def names(parts):
    return [[f"{part.replica.name}/{part.index}" for part in node] for node in parts]


def test_policies_come_first_and_rollouts_are_spread_over_the_other_nodes(recipe):
    run = recipe("policy.replicas=2", "policy.num_nodes=2", "policy.ranks_per_node=4", "rollout.replicas=3")
    parts = parts_of(run, 6)
    assert names(parts) == [
        ["policy-0/0"],
        ["policy-0/1"],
        ["policy-1/0"],
        ["policy-1/1"],
        ["rollout-0/0", "rollout-2/0"],
        ["rollout-1/0"],
    ]
    assert [node[0].first_node for node in parts] == [0, 0, 2, 2, 4, 5]


def test_without_further_nodes_the_rollouts_are_beside_the_policies(recipe):
    run = recipe("policy.replicas=2", "rollout.replicas=3")
    assert names(parts_of(run, 2)) == [["policy-0/0", "rollout-0/0", "rollout-2/0"], ["policy-1/0", "rollout-1/0"]]


@pytest.mark.parametrize("nodes", [1, 5])
def test_too_few_nodes_and_nodes_without_work_are_refused(recipe, nodes):
    with pytest.raises(
        UserError, match=rf"--nodes {nodes}: .* at least 2 for the policies, and has work for at most 4"
    ):
        parts_of(recipe("policy.replicas=2", "rollout.replicas=2"), nodes)


def test_the_processes_of_a_node_share_no_gpu(recipe):
    parts = parts_of(recipe("policy.ranks_per_node=2", "rollout.replicas=2"), 1)[0]
    assert gpus_of(parts, gpus=["4", "5", "6", "7"]) == [["4", "5"], ["6"], ["7"]]
    assert gpus_of(parts, gpus=[]) == [[], [], []]
    with pytest.raises(UserError, match="policy-0, rollout-0, rollout-1 need 4 GPUs of this node, which has 3"):
        gpus_of(parts, gpus=["0", "1", "2"])


def test_several_nodes_need_the_token(recipe, monkeypatch):
    monkeypatch.delenv("COSMOS_RL_TOKEN")
    with pytest.raises(UserError, match="COSMOS_RL_TOKEN is not set: give all nodes the same 64 hex digits"):
        ClusterNode(recipe=recipe(), nodes=2, node=0, head="127.0.0.1")
    assert len(ClusterNode(recipe=recipe(), nodes=1, node=0, head="127.0.0.1").token) == 32
    with pytest.raises(UserError, match="--node 2: there are 2 nodes"):
        ClusterNode(recipe=recipe(), nodes=2, node=2, head="127.0.0.1")


def meet(recipe, talk, *, policies=1):
    """Run `talk(meeting, join)`; `join(node)` connects a node."""

    async def go():
        several = (f"policy.replicas={policies}", "policy.num_nodes=2", "policy.ranks_per_node=1")
        meeting = Meeting(parts_of(recipe(*several, "rollout.replicas=1"), policies * 2 + 1))
        server = await serve("tcp://127.0.0.1:0", token=TOKEN, decode=NodeJoin | GivenUp, on_connect=meeting.on_connect)

        async def join(node, *, nodes=policies * 2 + 1, address="10.0.0.1", process="a"):
            hello = Hello(name=f"node-{node}", role="node")
            connection = await connect(server.address, token=TOKEN, hello=hello, decode=Begin | GivenUp | Over)
            await connection.send(NodeJoin(node=node, nodes=nodes, address=address, process=process))
            return connection

        try:
            await talk(meeting, join)
        finally:
            await server.close()

    asyncio.run(asyncio.wait_for(go(), 60))


def test_a_node_begins_with_the_address_of_its_replicas_first_machine(recipe):
    async def talk(meeting, join):
        second, rollouts = await join(1), await join(2, address="10.0.0.3")
        meeting.begun.set()
        assert (await rollouts.receive()).first == "10.0.0.3"
        meeting.join(0, "head")
        begin = await second.receive()
        assert begin.first == "head"
        again = await join(1)
        assert await again.receive() == begin
        with pytest.raises(ConnectionClosed):
            await second.receive()
        meeting.join(0, "elsewhere")  # the machines of its replica have to meet there
        with pytest.raises(ConnectionClosed):
            await again.receive()

    meet(recipe, talk)


def test_the_exit_code_reaches_all_nodes_also_of_a_run_that_never_began(recipe):
    async def talk(meeting, join):
        connections = [await join(1), await join(2)]
        meeting.over.set_result(2)
        for connection in connections:
            assert await connection.receive() == Over(2)
        gone = asyncio.create_task(meeting.all_gone(timeout_s=60.0))
        for connection in connections:
            assert not gone.done()
            connection.close()
        await gone

    meet(recipe, talk)


def test_without_its_only_policy_a_run_is_lost_and_reports_of_an_earlier_life_are_ignored(recipe):
    async def talk(meeting, join):
        second = await join(1)
        await second.send(GivenUp("an earlier life", "policy-0", 7))
        await second.send(GivenUp(meeting.life, "policy-0", 8))
        assert await meeting.lost == 8

    meet(recipe, talk)


def test_of_several_policies_the_other_parts_of_one_that_is_given_up_end_until_all_are_lost(recipe):
    async def talk(meeting, join):
        meeting.begun.set()
        meeting.join(0, "head")
        other, first, second = await join(1), await join(2, address="10.0.0.3"), await join(3)
        for connection in (other, first, second):
            assert isinstance(await connection.receive(), Begin)
        await second.send(GivenUp(meeting.life, "policy-1", 7))
        for connection in (first, second):
            assert await connection.receive() == GivenUp(meeting.life, "policy-1", 7)
        again = await join(3, process="b")  # its machine was started again, and with it the replica
        assert isinstance(await again.receive(), Begin)
        await other.send(GivenUp(meeting.life, "policy-0", 9))
        assert await other.receive() == GivenUp(meeting.life, "policy-0", 9)
        assert not meeting.lost.done()
        await first.send(GivenUp(meeting.life, "policy-1", 5))
        assert await meeting.lost == 5

    meet(recipe, talk, policies=2)


def test_a_node_of_another_number_of_nodes_is_refused(recipe):
    async def talk(meeting, join):
        answer = await (await join(1, nodes=4)).receive()
        assert answer.reason == "--nodes 4: node 0 was started with --nodes 3"

    meet(recipe, talk)


def test_of_two_machines_with_the_same_number_the_earlier_one_ends_with_the_reason(recipe):
    async def talk(meeting, join):
        earlier = await join(1)
        meeting.begun.set()
        meeting.join(0, "head")
        assert isinstance(await earlier.receive(), Begin)
        later = await join(1, address="10.0.0.9", process="b")
        over = await earlier.receive()
        assert over.reason == (
            "--node 1: another process has joined as this node, at 10.0.0.9; each machine needs a number of its own"
        )
        with pytest.raises(ConnectionClosed):
            await earlier.receive()
        assert isinstance(await later.receive(), Begin)

    meet(recipe, talk)


def test_a_node_says_once_that_it_waits(recipe, capfd):
    port = free_port()
    node = ClusterNode(recipe=recipe(), nodes=2, node=1, head="127.0.0.1", port=port)
    with pytest.raises(UserError, match=r"node 0 did not answer within 0\.1 s"):
        asyncio.run(node._connect(0.1))
    waits = f"node 1: waiting for node 0, up to 0.1 s: cannot connect to tcp://127.0.0.1:{port}"
    assert capfd.readouterr().out.count(waits) == 1


@pytest.fixture
def together(recipe, tmp_path, monkeypatch):
    """All machines of a run; returns their exit codes.

    `program` is what its workers run. The controller ends when there is a file `end`, and makes a file `over`.
    """
    monkeypatch.setattr("cosmos_rl_core.supervisor.PAUSE_S", 0.0)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")

    def run(program, *overrides, folders=(), nodes=1):
        (tmp_path / "cosmos-rl").write_text(
            "#!/bin/bash\n"
            f"if [ $1 != controller ]; then {program}; exit 0; fi\n"
            "trap 'touch over; exit 130' TERM; mkdir -p run; echo here > run/controller.json\n"
            "while [ ! -e end ]; do sleep 0.01; done; touch over\n"
        )
        (tmp_path / "cosmos-rl").chmod(0o755)
        command = f'cluster.command="{tmp_path}/cosmos-rl"'
        given = replace(recipe(command, "elastic.restart_workers=1", *overrides), folders=folders)
        port = free_port()
        all_nodes = [
            ClusterNode(recipe=given, nodes=nodes, node=node, head="127.0.0.1", port=port) for node in range(nodes)
        ]

        async def go():
            return await asyncio.gather(*(node.run() for node in all_nodes))

        return asyncio.run(asyncio.wait_for(go(), 60))

    return run


@pytest.fixture
def alone(together):
    """As `together`, with one machine."""
    return lambda program, *overrides, folders=(): together(program, *overrides, folders=folders)[0]


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_node_0_ends_the_run_when_its_only_policy_is_given_up(alone, capfd):
    assert alone('case "$*" in *policy*) exit 7;; esac; sleep 600') == 7
    assert capfd.readouterr().out.splitlines() == [
        "policy-0: exit code 7",
        "policy-0: exit code 7",
        "policy-0: not started again, after 2 starts ([elastic] restart_workers)",
        "controller: exit code 130",
        "rollout-0: signal SIGTERM",
    ]


WORK = "until [ -e over ]; do sleep 0.05; done"
TWO_MACHINES = ("policy.num_nodes=2", "policy.ranks_per_node=1", "rollout.replicas=1")


def test_a_part_of_the_only_policy_that_another_node_gives_up_ends_the_run_with_its_code(together, capfd):
    program = 'case "$*" in *"--node 1"*) exit 7;; esac; ' + WORK
    assert together(program, *TWO_MACHINES, nodes=3) == [7, 7, 7]
    out = capfd.readouterr().out.splitlines()
    assert out[:3] == [
        "policy-0: exit code 7",
        "policy-0: exit code 7",
        "policy-0: not started again, after 2 starts ([elastic] restart_workers)",
    ]
    assert out[3] == "controller: exit code 130"  # it was asked to end, and the other part did not crash before


def test_one_of_several_policies_that_is_given_up_ends_its_other_part_alone(together):
    # The part crashes when the other one runs: that one is killed, and the rollout sees it.
    crash = 'case "$*" in *"policy-1 "*"--node 1"*) until [ -s other ]; do sleep 0.01; done; exit 7;; esac'
    other = 'case "$*" in *"policy-1 "*) echo $$ > other ;; esac'
    gone = "until [ -s other ] && ! kill -0 $(cat other) 2>/dev/null; do sleep 0.05; done; touch end"
    rollout = f'case "$*" in *rollout*) {gone} ;; esac'
    codes = together(f"{crash}; {other}; {rollout}; {WORK}", "policy.replicas=2", *TWO_MACHINES, nodes=5)
    assert codes == [0, 0, 137, 7, 0]


def test_a_run_ends_when_the_last_of_several_policies_is_given_up(together):
    program = 'case "$*" in *policy*) exit 7;; esac; ' + WORK
    assert together(program, "policy.replicas=2", "rollout.replicas=1", nodes=3) == [7, 7, 7]


def test_a_rollout_that_is_given_up_does_not_end_the_run(alone, capfd):
    crash = "echo crash >> crashes; [ $(wc -l < crashes) = 2 ] && touch end; exit 7"
    assert alone(f'case "$*" in *rollout*) {crash};; esac; exit 0') == 0
    assert "rollout-0: not started again, after 2 starts" in capfd.readouterr().out


def test_an_error_of_node_0_ends_the_run(alone, monkeypatch):
    with pytest.raises(ValueError, match="null byte"):
        alone("exit 0", folders=("\0",))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    with pytest.raises(UserError, match="policy-0, rollout-0 need 2 GPUs of this node, which has 1"):
        alone("exit 0")


def test_with_tls_workers_take_the_certificate_from_the_run_directory(recipe, tmp_path, monkeypatch):
    node = ClusterNode(recipe=recipe("tls.enabled=true"), nodes=2, node=1, head="127.0.0.1")
    part = node._parts[1][0]
    arguments = node._arguments(part, "127.0.0.1")
    assert arguments[arguments.index("--tls-file") + 1] == str(tmp_path / "run" / "tls.pem")
    monkeypatch.setenv("COSMOS_RL_TLS", "the content of tls.pem")
    assert "--tls-file" not in node._arguments(part, "127.0.0.1")

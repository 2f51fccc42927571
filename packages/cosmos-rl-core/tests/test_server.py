"""The controller between its workers: messages in, messages out, over connections that are lists."""

import asyncio
import contextlib
import errno
import functools
import itertools
import json
from contextlib import asynccontextmanager, closing
from typing import ClassVar

import msgspec
import pytest

from cosmos_rl_core.control import protocol as p
from cosmos_rl_core.control.journal import Journal
from cosmos_rl_core.control.ledger import events
from cosmos_rl_core.control.ledger.ledger import Ledger
from cosmos_rl_core.control.ledger.liveness import ON_ITS_WAY_S
from cosmos_rl_core.control.ledger.membership import MemberState
from cosmos_rl_core.control.ledger.records import Position
from cosmos_rl_core.control.ledger.state import LedgerConfig
from cosmos_rl_core.control.peers import IN_USE_S, STARTING_S
from cosmos_rl_core.control.server import Controller
from cosmos_rl_core.control.settings import ControllerSettings
from cosmos_rl_core.data.source import PromptSource
from cosmos_rl_core.errors import TakenOver, UserError, WorkerFailed, WorkerLost
from cosmos_rl_core.observe.slices import at_once
from cosmos_rl_core.rollout.spool.store import Spooled
from cosmos_rl_core.wire.channel import ConnectionClosed, Hello


def waits_of(controller):
    return at_once(controller.scheduler.waits())


def in_a_loop(test):
    """Make a test of a coroutine."""

    @functools.wraps(test)
    def run(*arguments, **keywords):
        asyncio.run(asyncio.wait_for(test(*arguments, **keywords), 60))

    return run


class Worker:
    """A connected worker as the controller sees it: `says` goes in, what it is told comes out of `hears`."""

    def __init__(self, controller, role, name, *, incarnation=0):
        self.peer = Hello(name=name, role=role, incarnation=incarnation)
        self.closed = asyncio.Event()
        self._inbox, self._outbox = asyncio.Queue(), asyncio.Queue()
        self.served = asyncio.create_task(self._serve(controller))

    async def _serve(self, controller):
        with contextlib.suppress(ConnectionClosed):  # as the wire's server does
            await controller.on_connect(self)

    async def receive(self):
        message = await self._inbox.get()
        if message is None:
            raise ConnectionClosed("gone")
        return message

    async def consume(self, handle):
        while True:
            handle(await self.receive())

    def close(self):
        self.closed.set()

    def post(self, message):
        self._outbox.put_nowait(message)

    def says(self, *messages):
        for message in messages:
            self._inbox.put_nowait(message)

    async def hears(self, kind):
        """The next message of this kind."""
        while not isinstance(message := await asyncio.wait_for(self._outbox.get(), 30), kind):
            pass
        return message


class Observer:
    """Remembers the steps it is told of, and fails with `error` instead where there is one."""

    def __init__(self, error=None):
        self.reports, self.evaluations, self.notes, self.error = [], [], [], error

    def phase(self, text):
        pass

    def note(self, text):
        self.notes.append(text)

    def step(self, step, metrics):
        if self.error is not None:
            raise self.error
        self.reports.append((step, metrics))

    def evaluated(self, version, metrics, groups):
        self.evaluations.append((version, metrics))

    def rolled_back(self, version):
        self.reports = [(step, metrics) for step, metrics in self.reports if step < version]

    @property
    def steps(self):
        return [step for step, _ in self.reports]


@asynccontextmanager
async def running(tmp_path, *, observer=None, ledger=None, supervised=False, clock=None, **job):
    """A controller of a run of two groups a step, and the task in which it runs."""
    rows = [{"n": n} for n in range(10)]
    source = PromptSource(rows, origin="rows", shuffle=False, is_slow=lambda row: row["n"] != 2)
    job = ControllerSettings(
        config_toml="",
        run_dir=tmp_path,
        resume_from="",
        supervised=supervised,
        max_steps=2,
        eval_every_steps=0,
        eval_by=(),
        group_size=2,
        **job,
    )
    with closing(Journal(tmp_path / "journal")) as journal:
        controller = Controller(
            job,
            source=source,
            eval_source=None,
            ledger=ledger or Ledger(LedgerConfig(groups_per_step=2, max_steps=2)),
            journal=journal,
            clock=clock or asyncio.get_running_loop().time,
            observer=observer or Observer(),
        )
        task = asyncio.create_task(controller.run())
        yield controller, task
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def delivery(prompt, payload, *, version=0):
    return p.Deliver(
        sample=prompt.sample,
        attempt=prompt.attempt,
        min_version=version,
        max_version=version,
        num_terms=3,
        payload=payload,
    )


async def join(controller):
    policy, rollout = Worker(controller, "policy", "policy-0"), Worker(controller, "rollout", "rollout-0")
    for worker in (policy, rollout):
        await worker.hears(p.Welcome)
        worker.says(p.Ready(address="here"))
    await rollout.hears(p.SyncFrom)
    await policy.hears(p.Remesh)
    return policy, rollout


@in_a_loop
async def test_prompts_go_out_and_their_groups_come_back_as_a_batch(tmp_path):
    async with running(tmp_path) as (controller, _):
        policy, rollout = await join(controller)
        policy.says(p.RequestBatch(step=0))
        rollout.says(p.RequestLeases(version=0, capacity=8))
        granted = await rollout.hears(p.Grant)
        assert [(prompt.sample, prompt.row, prompt.origin) for prompt in granted.prompts] == [
            (0, b'{"n": 0}', "rows:1"),
            (1, b'{"n": 1}', "rows:2"),
        ]
        rollout.says(*(delivery(prompt, b"group %d" % prompt.sample) for prompt in reversed(granted.prompts)))
        batch = await policy.hears(p.Batch)
        assert (batch.step, batch.samples, batch.payloads) == (0, (0, 1), [b"group 0", b"group 1"])
        policy.says(p.Vote(step=0, epoch=batch.epoch))
        committed = await policy.hears(p.Committed)
        assert (committed.step, committed.next_sample, committed.unfinished) == (0, 2, ())


async def two_policies_and_a_rollout(controller):
    """Policies that have requested the first batch, and a rollout worker that has requested leases."""
    policies = [Worker(controller, "policy", f"policy-{place}") for place in range(2)]
    rollout = Worker(controller, "rollout", "rollout-0")
    for worker in (*policies, rollout):
        await worker.hears(p.Welcome)
        worker.says(p.Ready(address="here"))
    for policy in policies:
        policy.says(p.RequestBatch(step=0, epoch=(await policy.hears(p.Remesh)).epoch))
    rollout.says(p.RequestLeases(version=0, capacity=8))
    return policies, rollout


@in_a_loop
async def test_each_of_several_policies_gets_the_groups_of_its_part_alone(tmp_path):
    ledger = Ledger(LedgerConfig(groups_per_step=5, max_steps=2, policy_members=2))
    async with running(tmp_path, ledger=ledger) as (controller, _):
        policies, rollout = await two_policies_and_a_rollout(controller)
        granted = await rollout.hears(p.Grant)
        terms = {prompt.sample: prompt.sample + 1 for prompt in granted.prompts}
        for prompt in granted.prompts:
            group = delivery(prompt, b"group %d" % prompt.sample)
            rollout.says(msgspec.structs.replace(group, num_terms=terms[prompt.sample]))
        batches = [await policy.hears(p.Batch) for policy in policies]
        assert [batch.samples for batch in batches] == [(0, 1, 2, 3, 4)] * 2
        assert sorted(sample for batch in batches for sample in batch.part) == [0, 1, 2, 3, 4]
        for batch in batches:
            assert batch.payloads == [b"group %d" % sample for sample in batch.part]
        assert [sum(terms[sample] for sample in batch.part) for batch in batches] == [7, 8]


@in_a_loop
async def test_more_policies_than_groups_get_all_of_them(tmp_path):
    ledger = Ledger(LedgerConfig(groups_per_step=1, max_steps=2, policy_members=2))
    async with running(tmp_path, ledger=ledger) as (controller, _):
        policies, rollout = await two_policies_and_a_rollout(controller)
        rollout.says(delivery((await rollout.hears(p.Grant)).prompts[0], b"group"))
        for policy in policies:
            batch = await policy.hears(p.Batch)
            assert (batch.payloads, batch.part) == ([b"group"], None)


@in_a_loop
async def test_a_grant_has_the_number_of_rollouts_that_share_the_work(tmp_path):
    async with running(tmp_path, ledger=Ledger(LedgerConfig(groups_per_step=1, max_steps=9))) as (controller, _):
        policy, rollout = await join(controller)
        other = Worker(controller, "rollout", "rollout-1")
        await other.hears(p.Welcome)

        async def step(number):
            policy.says(p.RequestBatch(step=number))
            rollout.says(p.RequestLeases(version=number, capacity=1))
            grant = await rollout.hears(p.Grant)
            rollout.says(delivery(grant.prompts[0], b"group", version=number))
            policy.says(p.Vote(step=number, epoch=(await policy.hears(p.Batch)).epoch))
            await policy.hears(p.Committed)
            return grant.rollouts

        assert await step(0) == 2, "the first one that is ready must not take all prompts of the first step"
        assert await step(1) == 1, "the other one is not ready"


@in_a_loop
async def test_a_supervised_run_refuses_a_rollout_worker(tmp_path):
    ledger = Ledger(LedgerConfig(groups_per_step=2, max_steps=2, rollouts=False))
    async with running(tmp_path, supervised=True, ledger=ledger) as (controller, _):
        rollout = Worker(controller, "rollout", "a-spot-machine")
        assert (await rollout.hears(p.Refused)).reason == "a supervised run has no rollout workers"
        assert not controller.peers.by_name


@in_a_loop
async def test_a_supervised_batch_names_the_slow_rows_that_come_next(tmp_path):
    ledger = Ledger(LedgerConfig(groups_per_step=2, max_steps=2, rollouts=False))
    async with running(tmp_path, supervised=True, ledger=ledger) as (controller, _):
        policy = Worker(controller, "policy", "policy-0")
        await policy.hears(p.Welcome)
        policy.says(p.Ready())
        epoch = (await policy.hears(p.Remesh)).epoch
        policy.says(p.RequestBatch(step=0, epoch=epoch))
        batch = await policy.hears(p.Batch)
    assert batch.samples == (0, 1)
    assert [(sample, json.loads(row)) for sample, row in batch.upcoming] == [(3, ["rows:4", {"n": 3}])]


@in_a_loop
async def test_the_oldest_rollout_scores_the_real_rows_and_the_next_one_if_it_is_lost(tmp_path):
    async with running(tmp_path) as (controller, _):
        first = Worker(controller, "rollout", "a-spot-machine")
        assert (await first.hears(p.Welcome)).scores_rows
        for role, name in (("policy", "policy-0"), ("rollout", "rollout-0")):
            assert not (await Worker(controller, role, name).hears(p.Welcome)).scores_rows
        first.says(None)  # its connection closes
        await first.served
        second = Worker(controller, "rollout", "rollout-1")
        assert (await second.hears(p.Welcome)).scores_rows
        second.says(p.Validated(version=0, metrics={"data/rows": 4.0}))
        await until(lambda: controller.peers.rows_scored)
        second.says(None)
        await second.served
        assert not (await Worker(controller, "rollout", "rollout-2").hears(p.Welcome)).scores_rows


@in_a_loop
async def test_many_workers_that_wait_for_the_same_have_one_line(tmp_path):
    async with running(tmp_path) as (controller, _):
        rollouts = [Worker(controller, "rollout", f"rollout-{number}") for number in range(6)]
        for rollout in rollouts:
            await rollout.hears(p.Welcome)
            rollout.says(p.Ready())
        await until(
            lambda: waits_of(controller)[1:] == ["rollout-0 waits for weights: no policy is ready (and 5 others)"]
        )
        rollouts[4].says(p.Heartbeat(version=0), p.RequestLeases(version=0, capacity=1))
        await rollouts[4].hears(p.Grant)
        rollouts[5].says(None)
        await rollouts[5].served
        lines = [f"rollout-{number} waits for weights: no policy is ready" for number in range(4)]
        assert [line for line in waits_of(controller) if "weights" in line] == lines


@in_a_loop
async def test_workers_on_one_gpu_are_reported(tmp_path):
    """Workers that are started by hand on one machine all take its first GPU."""
    observer = Observer()
    async with running(tmp_path, observer=observer) as (controller, _):
        for name, gpu in (("rollout-0", "GPU-1"), ("rollout-1", ""), ("rollout-2", ""), ("rollout-3", "GPU-1")):
            worker = Worker(controller, "rollout", name)
            await worker.hears(p.Welcome)
            worker.says(p.Ready(gpu=gpu))
            await until(lambda name=name: controller.peers.by_name[name].is_ready)
        notes = [note for note in observer.notes if "GPU" in note]
        assert notes == [
            "rollout-3 is on the GPU of rollout-0 (GPU-1): give each worker its own by CUDA_VISIBLE_DEVICES, "
            "or set [run] share_gpus = true"
        ]


@in_a_loop
async def test_every_idle_worker_has_the_reason_for_which_it_waits(tmp_path):
    async with running(tmp_path) as (controller, _):
        rollout = Worker(controller, "rollout", "rollout-0")
        await rollout.hears(p.Welcome)
        assert waits_of(controller) == ["the run waits for policy replicas: 0 of 1 ready"], "it builds its engine"
        rollout.says(p.Ready())
        await until(lambda: waits_of(controller)[1:] == ["rollout-0 waits for weights: no policy is ready"])
        policy = Worker(controller, "policy", "policy-0")
        await policy.hears(p.Welcome)
        policy.says(p.Ready(address="here"))
        await rollout.hears(p.SyncFrom)
        assert waits_of(controller) == ["rollout-0 waits for weights: it loads them"]
        rollout.says(p.Heartbeat(version=0), p.RequestLeases(version=0, capacity=1))
        granted = await rollout.hears(p.Grant)
        assert waits_of(controller) == [], "both work"
        policy.says(p.RequestBatch(step=0))
        await until(lambda: waits_of(controller) != [])
        assert waits_of(controller) == ["policy-0 waits for batch 0: 0 of 2 groups ready, 1 leased to rollout-0"]
        rollout.says(delivery(granted.prompts[0], b"group"))
        await until(lambda: len(waits_of(controller)) == 2)
        assert waits_of(controller)[1].startswith("rollout-0 waits for room: it can store no further group")
        rollout.says(p.RequestLeases(version=0, capacity=1))
        granted = await rollout.hears(p.Grant)
        rollout.says(delivery(granted.prompts[0], b"group"))
        await policy.hears(p.Batch)
        late = Worker(controller, "policy", "policy-1")
        await late.hears(p.Welcome)
        late.says(p.Ready(address="there"))
        await until(lambda: "policy-1 waits for the end of step 0, to join the mesh" in waits_of(controller))


@in_a_loop
async def test_a_second_delivery_of_a_sample_does_not_replace_the_first(tmp_path):
    async with running(tmp_path) as (controller, _):
        policy, rollout = await join(controller)
        policy.says(p.RequestBatch(step=0))
        rollout.says(p.RequestLeases(version=0, capacity=8))
        zero, one = (await rollout.hears(p.Grant)).prompts
        rollout.says(delivery(zero, b"first"), delivery(zero, b"second"), delivery(one, b"other"))
        assert (await policy.hears(p.Batch)).payloads == [b"first", b"other"]


@in_a_loop
async def test_a_repeated_vote_for_an_old_step_frees_nothing_of_the_batch_in_work(tmp_path):
    async with running(tmp_path) as (controller, _):
        policy, rollout = await join(controller)
        for step in (0, 1):
            policy.says(p.RequestBatch(step=step))
            rollout.says(p.RequestLeases(version=step, capacity=2))
            granted = await rollout.hears(p.Grant)
            rollout.says(*(delivery(each, b"group %d" % each.sample, version=step) for each in granted.prompts))
            batch = await policy.hears(p.Batch)
            if step == 0:
                policy.says(p.Vote(step=0, epoch=batch.epoch))
                await policy.hears(p.Committed)
        policy.says(p.Vote(step=0, epoch=batch.epoch))
        assert (await policy.hears(p.Committed)).step == 0
        policy.says(p.RequestBatch(step=1))
        assert (await policy.hears(p.Batch)).payloads == [b"group 2", b"group 3"]


@in_a_loop
async def test_two_policy_replicas_report_a_step_once(tmp_path):
    observer = Observer()
    ledger = Ledger(LedgerConfig(groups_per_step=2, max_steps=2, policy_members=2, suspect_grace_s=0.1))
    async with running(tmp_path, observer=observer, ledger=ledger) as (controller, _):
        zero, one = Worker(controller, "policy", "policy-0"), Worker(controller, "policy", "policy-1")
        for policy in (zero, one):
            await policy.hears(p.Welcome)
            policy.says(p.Ready())
        await until(lambda: ledger.members.mesh == ("policy-0", "policy-1"))
        one.says(p.StepDone(step=0, version=1, metrics={"of": 1.0}))
        zero.says(p.StepDone(step=0, version=1, metrics={"of": 0.0}), p.Validated(version=1, metrics={"of": 0.0}))
        one.says(p.StepDone(step=1, version=2, metrics={"of": 1.0}), p.Validated(version=1, metrics={"of": 1.0}))
        await until(lambda: observer.evaluations == [(1, {"of": 0.0})])
        assert [(step, metrics["of"]) for step, metrics in observer.reports] == [(0, 0.0)]
        zero.says(None)  # it had no time to report step 1
        await until(lambda: observer.steps == [0, 1])
        assert observer.reports[1][1]["of"] == 1.0
        one.says(p.StepDone(step=1, version=2, metrics={"of": 2.0}), p.Alarm(message="the last word"))
        await until(lambda: observer.notes[-1] == "policy-1: the last word")
        assert observer.steps == [0, 1]


@in_a_loop
async def test_a_group_that_fails_is_reported_at_once_and_then_seldom(tmp_path):
    observer = Observer()
    async with running(tmp_path, observer=observer) as (controller, _):
        policy, rollout = Worker(controller, "policy", "policy-0"), Worker(controller, "rollout", "rollout-0")
        for worker in (policy, rollout):
            await worker.hears(p.Welcome)
            worker.says(p.Ready())
        rollout.says(p.RequestLeases(version=0, capacity=2))
        for prompt in (await rollout.hears(p.Grant)).prompts:
            rollout.says(p.Failed(prompt.sample, prompt.attempt, f"reward 'judge' on rows:{prompt.sample} raised"))
        slow = p.Alarm(message="reward 'judge' is slow or hangs")
        rollout.says(slow, slow, p.Alarm(message="the end"))
        await until(lambda: observer.notes[-1:] == ["rollout-0: the end"])
        assert [note for note in observer.notes if "is ready" not in note] == [
            "a group failed (rollout-0): reward 'judge' on rows:0 raised",
            "rollout-0: reward 'judge' is slow or hangs",
            "rollout-0: the end",
        ]


@pytest.mark.parametrize("external", [True, False], ids=["waits for another policy", "ends at once"])
@in_a_loop
async def test_the_last_report_of_a_policy_that_leaves_is_kept_although_the_first_one_has_died(external, tmp_path):
    """The first one dies after the commit and before its report, and is suspect when the other one leaves."""
    observer = Observer()
    ledger = Ledger(LedgerConfig(groups_per_step=2, max_steps=2, policy_members=2, suspect_grace_s=0.5))
    job = {"newest_checkpoint": lambda: (Position(1, 2), "step_1"), "policy_wait_s": 0.05, "external": external}
    async with running(tmp_path, observer=observer, ledger=ledger, **job) as (controller, task):
        (zero, one), rollout = await two_policies_and_a_rollout(controller)
        first, second = (await rollout.hears(p.Grant)).prompts[:2]
        rollout.says(delivery(first, b"first"), delivery(second, b"second"))
        for policy in (zero, one):
            policy.says(p.Vote(step=0, epoch=(await policy.hears(p.Batch)).epoch))
        await one.hears(p.Committed)
        zero.says(None)
        await until(lambda: ledger.members.by_name["policy-0"].state is MemberState.SUSPECT)
        one.says(p.StepDone(step=0, version=1, metrics={}), p.CheckpointDone(step=1, path="step_1", lineage=0))
        one.says(p.Goodbye())
        await asyncio.wait_for(task, 10.0)
    assert observer.steps == [0]


async def until(condition):
    """Wait until the controller has brought something about."""
    while not condition():
        await asyncio.sleep(0.005)


# -- policies that are lost and replaced


@in_a_loop
async def test_rollouts_are_sent_to_another_policy_when_the_publishing_one_dies(tmp_path):
    ledger = Ledger(LedgerConfig(groups_per_step=2, max_steps=2, policy_members=2, suspect_grace_s=0.1))
    async with running(tmp_path, ledger=ledger) as (controller, _):
        rollout = Worker(controller, "rollout", "rollout-0")
        await rollout.hears(p.Welcome)
        rollout.says(p.Ready())
        policies = [Worker(controller, "policy", f"policy-{i}") for i in (0, 1)]
        for policy in reversed(policies):
            await policy.hears(p.Welcome)
            policy.says(p.Ready(address=f"weights of {policy.peer.name}"))
        await until(lambda: ledger.members.mesh == ("policy-0", "policy-1"))
        while (await rollout.hears(p.SyncFrom)).address != "weights of policy-0":
            pass
        policies[0].says(None)
        assert await rollout.hears(p.SyncFrom) == p.SyncFrom(address="weights of policy-1", lineage=0)


@in_a_loop
async def test_after_the_loss_of_all_policies_a_new_one_trains_the_undone_steps_again(tmp_path):
    observer = Observer()
    ledger = Ledger(LedgerConfig(groups_per_step=2, max_steps=2, max_staleness=1, suspect_grace_s=0.1))
    checkpoints = {"newest_checkpoint": lambda: (Position(0, 0), "step_0"), "policy_wait_s": 30.0}
    async with running(tmp_path, observer=observer, ledger=ledger, **checkpoints) as (controller, _):
        policy, rollout = await join(controller)
        rollout.says(p.RequestLeases(version=0, capacity=3))
        zero, one, two = (await rollout.hears(p.Grant)).prompts
        rollout.says(delivery(zero, b"zero"), delivery(one, b"one"))
        policy.says(p.RequestBatch(step=0))
        batch = await policy.hears(p.Batch)
        policy.says(p.Vote(step=0, epoch=batch.epoch))
        await policy.hears(p.Committed)
        policy.says(p.StepDone(step=0, version=1, metrics={"of": 0.0}), None)

        assert await rollout.hears(p.LineageRolledBack) == p.LineageRolledBack(
            lineage=1, version=0, resume_from="step_0"
        )
        assert observer.steps == []
        policy = Worker(controller, "policy", "policy-0")
        welcome = await policy.hears(p.Welcome)
        assert (welcome.lineage, welcome.version, welcome.resume_from) == (1, 0, "step_0")
        policy.says(p.Ready(address="there"))
        await policy.hears(p.Remesh)
        policy.says(p.RequestBatch(step=0))
        assert await rollout.hears(p.SyncFrom) == p.SyncFrom(address="there", lineage=1)

        rollout.says(delivery(two, b"sampled before the rollback"), p.RequestLeases(version=1, capacity=3))
        rollout.says(p.RequestLeases(version=0, capacity=3, lineage=1))
        again = (await rollout.hears(p.Grant)).prompts
        assert [(prompt.sample, prompt.attempt) for prompt in again] == [(0, 2), (1, 2), (2, 2)]
        rollout.says(*(msgspec.structs.replace(delivery(each, b"again"), lineage=1) for each in again))
        batch = await policy.hears(p.Batch)
        assert (batch.step, batch.samples, batch.payloads) == (0, (0, 1), [b"again", b"again"])
        policy.says(p.Vote(step=0, epoch=batch.epoch))
        await policy.hears(p.Committed)
        policy.says(p.StepDone(step=0, version=1, metrics={"of": 1.0}))
        policy.says(p.CheckpointDone(step=1, path="the old step_1", lineage=0))
        policy.says(p.CheckpointDone(step=1, path="step_1", lineage=1))
        await until(lambda: ledger.checkpoint_version == 1)
        assert controller.recovery.checkpoint == "step_1"
        assert [(step, metrics["of"]) for step, metrics in observer.reports] == [(0, 1.0)]


@in_a_loop
async def test_groups_of_a_batch_in_work_are_kept_over_the_loss_of_all_policies(tmp_path):
    ledger = Ledger(LedgerConfig(groups_per_step=2, max_steps=2, suspect_grace_s=0.1))
    async with running(tmp_path, ledger=ledger, policy_wait_s=30.0) as (controller, _):
        policy, _, batch = await batch_of_references(controller)
        policy.says(None)
        await until(lambda: ledger.lineage == 1)
        policy = Worker(controller, "policy", "policy-0")
        await policy.hears(p.Welcome)
        policy.says(p.Ready())
        await policy.hears(p.Remesh)
        policy.says(p.RequestBatch(step=0))
        assert (await policy.hears(p.Batch)).payloads == batch.payloads


@in_a_loop
async def test_a_new_process_of_the_policy_is_welcomed_after_the_rollback_even_within_the_grace(tmp_path):
    ledger = Ledger(LedgerConfig(groups_per_step=2, max_steps=2, suspect_grace_s=1e9))
    async with running(tmp_path, ledger=ledger, policy_wait_s=30.0) as (controller, _):
        await join(controller)
        policy = controller.peers.by_name["policy-0"]
        policy.beat(p.Heartbeat(), now=policy.heartbeat_at - IN_USE_S)  # silent since: its connection is half open
        welcome = await Worker(controller, "policy", "policy-0").hears(p.Welcome)
        assert (welcome.lineage, welcome.incarnation) == (1, 2)


@in_a_loop
async def test_a_second_process_under_the_name_of_a_live_worker_is_refused(tmp_path):
    async with running(tmp_path) as (controller, _):
        policy, rollout = await join(controller)
        for role, name in (("policy", "policy-0"), ("rollout", "rollout-0")):
            second = Worker(controller, role, name)
            assert "give this one another by --name" in (await second.hears(p.Refused)).reason
            await second.served
        controller.peers.by_name["policy-0"].heartbeat_at -= STARTING_S - 10  # it still imports torch
        assert "give this one another" in (await Worker(controller, "policy", "policy-0").hears(p.Refused)).reason
        assert not policy.served.done() and not rollout.served.done()


@in_a_loop
async def test_a_policy_that_joins_when_the_others_are_done_does_not_keep_the_run_alive(tmp_path):
    ledger = Ledger(LedgerConfig(groups_per_step=2, max_steps=2, suspect_grace_s=0.1))
    async with running(tmp_path, ledger=ledger, policy_wait_s=30.0) as (controller, task):
        policy, rollout = await join(controller)
        for step in (0, 1):
            policy.says(p.RequestBatch(step=step))
            rollout.says(p.RequestLeases(version=step, capacity=2))
            granted = await rollout.hears(p.Grant)
            rollout.says(*(delivery(each, b"group", version=step) for each in granted.prompts))
            policy.says(p.Vote(step=step, epoch=(await policy.hears(p.Batch)).epoch))
            await policy.hears(p.Committed)
        await Worker(controller, "policy", "policy-1").hears(p.Welcome)
        policy.says(p.Goodbye())
        await task
        assert ledger.lineage == 0


@pytest.mark.parametrize(
    ("wait_s", "message"),
    [
        (0.0, "^the last policy replica is gone$"),
        (0.05, "^the last policy replica is gone, and no other one has come within 0.05 s$"),
    ],
)
@in_a_loop
async def test_without_another_policy_the_run_fails(wait_s, message, tmp_path):
    ledger = Ledger(LedgerConfig(groups_per_step=2, max_steps=2, suspect_grace_s=0.1))
    async with running(tmp_path, ledger=ledger, policy_wait_s=wait_s) as (controller, task):
        policy, _ = await join(controller)
        policy.says(None)
        with pytest.raises(WorkerFailed, match=message):
            await task


@in_a_loop
async def test_a_policy_that_dies_before_it_is_ready_is_waited_for_as_its_predecessor(tmp_path):
    ledger = Ledger(LedgerConfig(groups_per_step=2, max_steps=2, suspect_grace_s=0.1))
    async with running(tmp_path, ledger=ledger, policy_wait_s=0.3) as (controller, task):
        policy, _ = await join(controller)
        policy.says(None)
        await until(lambda: ledger.lineage == 1)
        second = Worker(controller, "policy", "policy-0")
        await second.hears(p.Welcome)
        second.says(None)
        with pytest.raises(WorkerFailed, match="no other one has come within"):
            await task


@in_a_loop
async def test_a_checkpoint_that_cannot_be_read_ends_the_run(tmp_path):
    def damaged():
        raise UserError("none of the checkpoints is whole")

    ledger = Ledger(LedgerConfig(groups_per_step=2, max_steps=2, suspect_grace_s=0.1))
    job = {"newest_checkpoint": damaged, "policy_wait_s": 30.0}
    async with running(tmp_path, ledger=ledger, **job) as (controller, task):
        policy, _ = await join(controller)
        policy.says(None)
        with pytest.raises(UserError, match="none of the checkpoints is whole"):
            await task


@in_a_loop
async def test_a_worker_whose_process_has_ended_is_not_waited_for(tmp_path):
    ledger = Ledger(LedgerConfig(groups_per_step=2, max_steps=2, suspect_grace_s=1e9))
    async with running(tmp_path, ledger=ledger) as (controller, _):
        _, rollout = await join(controller)
        rollout.says(p.RequestLeases(version=0, capacity=8))
        zero, one = (await rollout.hears(p.Grant)).prompts
        controller.lifecycle.ended("rollout-0")
        rollout.says(delivery(zero, b"the last word"), None)
        other = Worker(controller, "rollout", "rollout-1")
        await other.hears(p.Welcome)
        other.says(p.Ready(), p.RequestLeases(version=0, capacity=8))
        assert [prompt.sample for prompt in (await other.hears(p.Grant)).prompts] == [one.sample]


@in_a_loop
async def test_a_policy_whose_rank_has_died_on_another_machine_is_removed_and_refused_when_it_returns(tmp_path):
    """Its first rank may wait for a batch that never comes, as rollouts wait for weights of the dead rank."""
    ledger = Ledger(LedgerConfig(groups_per_step=2, max_steps=2, suspect_grace_s=1e9))
    async with running(tmp_path, ledger=ledger, policy_wait_s=30.0) as (controller, task):
        policy, _ = await join(controller)
        controller.lifecycle.failed("policy-0", WorkerLost("policy-0, rank 1: died (signal SIGKILL)"))
        assert policy.closed.is_set()
        policy.says(None)
        await policy.served
        again = Worker(controller, "policy", "policy-0", incarnation=1)
        again.says(p.Rejoin())
        assert "away for too long" in (await again.hears(p.Refused)).reason
        welcome = await Worker(controller, "policy", "policy-0").hears(p.Welcome)
        assert (welcome.lineage, welcome.incarnation) == (1, 2)
        controller.lifecycle.failed("policy-7", WorkerLost("of a replica that is gone"))
        assert not task.done()


# -- groups that lie in spools


def spooled(sample, *, copy=0):
    return Spooled(path=f"/spool/rollout-0/{sample}-{copy}.group", num_bytes=9, digest=bytes(32))


async def batch_of_references(controller):
    """A policy with the batch of two spooled groups, and the replica that made them."""
    policy, rollout = await join(controller)
    policy.says(p.RequestBatch(step=0))
    rollout.says(p.RequestLeases(version=0, capacity=8))
    granted = await rollout.hears(p.Grant)
    rollout.says(*(delivery(prompt, spooled(prompt.sample)) for prompt in granted.prompts))
    return policy, rollout, await policy.hears(p.Batch)


@in_a_loop
async def test_references_travel_with_the_address_of_their_replica_and_are_released_after_the_commit(tmp_path):
    async with running(tmp_path) as (controller, _):
        policy, rollout, batch = await batch_of_references(controller)
        assert batch.payloads == [msgspec.structs.replace(spooled(sample), address="here") for sample in (0, 1)]
        policy.says(p.Vote(step=0, epoch=batch.epoch))
        assert (await rollout.hears(p.Release)).paths == [spooled(0).path, spooled(1).path]


@in_a_loop
async def test_a_delivery_that_is_not_taken_is_released(tmp_path):
    async with running(tmp_path) as (controller, _):
        _, rollout, _ = await batch_of_references(controller)
        rollout.says(delivery(p.LeasedPrompt(sample=0, attempt=1, row=b"", origin=""), spooled(0, copy=1)))
        assert (await rollout.hears(p.Release)).paths == [spooled(0, copy=1).path]


@in_a_loop
async def test_a_group_that_cannot_be_read_is_leased_again_and_comes_in_another_batch(tmp_path):
    observer = Observer()
    async with running(tmp_path, observer=observer) as (controller, _):
        policy, rollout, batch = await batch_of_references(controller)
        rollout.says(p.RequestLeases(version=0, capacity=8))
        policy.says(p.PayloadsUnreadable(step=0, epoch=batch.epoch, samples=(1,), reason="it is gone"))
        [again] = (await rollout.hears(p.Grant)).prompts
        assert (again.sample, again.attempt) == (1, 2)
        rollout.says(delivery(again, spooled(1, copy=2)))
        policy.says(p.RequestBatch(step=0, epoch=(await policy.hears(p.Remesh)).epoch))
        anew = await policy.hears(p.Batch)
        assert (anew.step, anew.samples, anew.epoch) == (0, (0, 1), batch.epoch + 1)
        assert [payload.path for payload in anew.payloads] == [spooled(0).path, spooled(1, copy=2).path]
        assert "groups lost and generated again: 1 (policy-0: it is gone)" in observer.notes


@in_a_loop
async def test_a_group_in_a_file_of_a_worker_that_leaves_is_taken_from_its_message(tmp_path):
    ledger = Ledger(LedgerConfig(groups_per_step=2, max_steps=2, suspect_grace_s=0.1))
    async with running(tmp_path, ledger=ledger) as (controller, _):
        policy, rollout = await join(controller)
        rollout.says(p.RequestLeases(version=0, capacity=8))
        zero, one = (await rollout.hears(p.Grant)).prompts
        rollout.says(*(delivery(prompt, spooled(prompt.sample)) for prompt in (zero, one)))
        rollout.says(delivery(zero, b"zero"))
        assert await rollout.hears(p.Release) == p.Release([spooled(0).path])  # nobody reads it
        policy.says(p.RequestBatch(step=0))
        batch = await policy.hears(p.Batch)
        assert batch.payloads == [b"zero", msgspec.structs.replace(spooled(1), address="here")]
        rollout.says(delivery(one, b"one"))  # the policy may be reading the file
        policy.says(p.Vote(step=0, epoch=batch.epoch))
        assert await rollout.hears(p.Release) == p.Release([spooled(1).path], groups=((0, 1), (1, 1)))


@in_a_loop
async def test_a_successor_is_told_which_files_are_still_needed(tmp_path):
    async with running(tmp_path) as (controller, _):
        _, rollout, _ = await batch_of_references(controller)
        rollout.says(None)
        assert (await Worker(controller, "rollout", "rollout-0").hears(p.Welcome)).kept == [
            spooled(0).path,
            spooled(1).path,
        ]


@in_a_loop
async def test_references_of_a_replica_that_is_gone_have_no_address(tmp_path):
    async with running(tmp_path) as (controller, _):
        policy, rollout = await join(controller)
        rollout.says(p.RequestLeases(version=0, capacity=8))
        granted = await rollout.hears(p.Grant)
        rollout.says(*(delivery(prompt, spooled(prompt.sample)) for prompt in granted.prompts), None)
        await asyncio.wait([rollout.served])
        policy.says(p.RequestBatch(step=0))
        assert [payload.address for payload in (await policy.hears(p.Batch)).payloads] == ["", ""]


# -- the end of the run


@in_a_loop
async def test_a_worker_that_comes_when_the_run_is_over_is_sent_away(tmp_path):
    async with running(tmp_path) as (controller, task):
        controller.outcome.fail(WorkerFailed("policy-0: it broke"))
        with pytest.raises(WorkerFailed, match="it broke"):
            await task
        for incarnation in (0, 3):
            late = Worker(controller, "rollout", "rollout-0", incarnation=incarnation)
            assert (await late.hears(p.Stop)).reason == "the run is over"
            await asyncio.wait_for(late.served, 30)


@in_a_loop
async def test_a_controller_that_was_replaced_says_nothing_to_workers(tmp_path):
    async with running(tmp_path) as (controller, task):
        controller.outcome.fail(TakenOver("another controller has taken over"))
        with pytest.raises(TakenOver):
            await task
        late = Worker(controller, "rollout", "rollout-0")
        await asyncio.wait_for(late.served, 30)
        assert late._outbox.empty()


@in_a_loop
async def test_an_error_in_the_ledger_ends_the_run(tmp_path):
    """A supervised controller crashes, and the next one replays the journal."""

    class Broken(Ledger):
        rules: ClassVar = {**Ledger.rules, p.RequestLeases: lambda ledger, replica, message: ledger.decide(None)}

    ledger = Broken(LedgerConfig(groups_per_step=2, max_steps=2))
    async with running(tmp_path, ledger=ledger) as (controller, task):
        _, rollout = await join(controller)
        rollout.says(p.RequestLeases(version=0, capacity=8))
        with pytest.raises(KeyError):
            await task
        controller.dismiss()
        await rollout.hears(p.Stop)


@in_a_loop
async def test_a_worker_whose_handler_fails_is_lost(tmp_path):
    async with running(tmp_path) as (controller, _):

        async def broken(handle):
            raise RuntimeError("broken")

        rollout = Worker(controller, "rollout", "rollout-0")
        rollout.consume = broken
        with pytest.raises(RuntimeError, match="broken"):
            await rollout.served
        assert "rollout-0" not in controller.peers.by_name


@in_a_loop
async def test_a_file_the_observer_cannot_write_ends_the_run_and_not_the_connection(tmp_path):
    full = OSError(errno.ENOSPC, "No space left on device")
    async with running(tmp_path, observer=Observer(full)) as (controller, task):
        policy, _ = await join(controller)
        policy.says(p.StepDone(step=0, version=1, metrics={}))
        with pytest.raises(OSError, match="No space left"):
            await task
        controller.dismiss()
        assert (await policy.hears(p.Stop)).reason == "the run is over"


@in_a_loop
async def test_a_stopped_run_gives_out_no_more_batches(tmp_path):
    async with running(tmp_path) as (controller, task):
        policy, _ = await join(controller)
        controller.stop("interrupted")
        assert (await policy.hears(p.Stop)).reason == "interrupted"
        policy.says(p.RequestBatch(step=0))
        assert (await policy.hears(p.Batch)).samples == ()
        policy.says(p.CheckpointDone(step=0, path="step_0"), p.Goodbye())
        await task
        assert controller.recovery.checkpoint == "step_0"


@pytest.mark.parametrize(("user", "kind"), [(True, UserError), (False, WorkerFailed)])
@in_a_loop
async def test_what_went_wrong_in_a_worker_ends_the_run(user, kind, tmp_path):
    async with running(tmp_path) as (controller, task):
        _, rollout = await join(controller)
        rollout.says(p.Fatal(message="no such model", user=user))
        with pytest.raises(kind, match="no such model"):
            await task


@in_a_loop
async def test_a_policy_that_only_lost_another_one_does_not_end_the_run(tmp_path):
    observer = Observer()
    async with running(tmp_path, observer=observer) as (controller, task):
        policy, rollout = await join(controller)
        policy.says(p.Fatal(message="RuntimeError: Connection closed by peer", user=False, lost=True))
        rollout.says(p.Fatal(message="RuntimeError: Broken pipe", user=False, lost=True))  # it has no peers
        with pytest.raises(WorkerFailed, match="rollout-0: RuntimeError: Broken pipe"):
            await task
    assert "policy-0: RuntimeError: Connection closed by peer" in observer.notes


@in_a_loop
async def test_a_policy_that_fails_before_it_has_the_weights_of_the_others_does_not_end_the_run(tmp_path):
    """It was ready, and in the mesh."""
    observer = Observer()
    async with running(tmp_path, observer=observer) as (controller, task):
        policy, _ = await join(controller)
        newcomer = Worker(controller, "policy", "policy-1")
        await newcomer.hears(p.Welcome)
        newcomer.says(p.Ready(address="tcp://127.0.0.1:2"))
        assert (await newcomer.hears(p.Remesh)).members == ("policy-0", "policy-1")
        newcomer.says(p.Fatal(message="too little memory", user=True), None)
        while (mesh := await policy.hears(p.Remesh)).members != ("policy-0",):
            pass
        assert mesh.epoch == 3
        assert not task.done()
    assert "policy-1 could not start, and the run continues without it: too little memory" in observer.notes


@in_a_loop
async def test_a_policy_that_leaves_others_is_dismissed_and_its_goodbye_ends_nothing(tmp_path):
    observer = Observer()
    async with running(tmp_path, observer=observer, ledger=of_two_policies()) as (controller, task):
        policies = [Worker(controller, "policy", name) for name in ("policy-0", "policy-1")]
        for policy in policies:
            await policy.hears(p.Welcome)
            policy.says(p.Ready(address="here"))
        for policy in policies:
            await policy.hears(p.Remesh)
        leaver, other = policies
        leaver.says(p.Leaving())
        await asyncio.sleep(ON_ITS_WAY_S)  # a sign of life counts from then on
        other.says(p.Heartbeat(progress=1))
        assert (await leaver.hears(p.Leave)).save is False
        assert (await leaver.hears(p.Stop)).reason == "it has left"
        leaver.says(p.Goodbye(), None)
        assert (await other.hears(p.Remesh)).members == ("policy-1",)
        assert not task.done()
    assert observer.notes.count("policy-0 has left") == 1
    assert not any("replaced or removed" in note for note in observer.notes)


@in_a_loop
async def test_a_worker_that_was_removed_while_it_was_cut_off_is_logged_once(tmp_path):
    observer = Observer()
    ledger = Ledger(LedgerConfig(groups_per_step=2, max_steps=2, silence_s=0.5, suspect_grace_s=0.1))
    async with running(tmp_path, observer=observer, ledger=ledger) as (controller, task):
        policy, rollout = await join(controller)
        beats = itertools.count(1)
        while ledger.members.by_name["rollout-0"].state is not MemberState.GONE:
            policy.says(p.Heartbeat(progress=next(beats)))
            await asyncio.sleep(0.05)
        rollout.says(*(p.Heartbeat(progress=beat) for beat in range(1, 7)))
        assert (await rollout.hears(p.Reject)).fenced
        assert rollout.closed.is_set()
        late = Worker(controller, "rollout", "rollout-1")
        await late.hears(p.Welcome)  # sent after the answers to all heartbeats
        assert not task.done()
    assert observer.notes.count("rollout-0: rollout-0 incarnation 1 was replaced or removed; rejoin") == 1


@in_a_loop
async def test_the_loss_of_the_last_rollout_worker_of_others_is_reported_at_once(tmp_path):
    observer = Observer()
    async with running(tmp_path, observer=observer, external=True) as (controller, task):
        _, rollout = await join(controller)
        late = Worker(controller, "rollout", "rollout-1")
        await late.hears(p.Welcome)
        rollout.says(p.Goodbye())
        await rollout.hears(p.Stop)
        assert not any("no rollout worker" in note for note in observer.notes)
        late.says(p.Goodbye())
        await late.hears(p.Stop)
        assert observer.notes[-1] == "no rollout worker is left after rollout-1: the run waits for another one"
        assert not task.done()


class CountsTicks(Ledger):
    ticks = 0

    def on(self, now, event):
        self.ticks += isinstance(event, events.Tick)
        return super().on(now, event)


@in_a_loop
async def test_a_controller_that_was_stopped_for_an_hour_suspects_nobody(tmp_path):
    now = 0.0
    ledger = CountsTicks(LedgerConfig(groups_per_step=2, max_steps=2, silence_s=9.0, suspect_grace_s=0.1))
    async with running(tmp_path, ledger=ledger, clock=lambda: now) as (controller, task):
        policy, rollout = await join(controller)
        now, ticks = 3600.0, ledger.ticks
        while ledger.ticks < ticks + 2:  # no heartbeat of that hour was read yet
            await asyncio.sleep(0.05)
        assert {member.state for member in ledger.members.by_name.values()} == {MemberState.READY}
        policy.says(p.RequestBatch(step=0))
        rollout.says(p.RequestLeases(version=0, capacity=8))
        for prompt in (await rollout.hears(p.Grant)).prompts:
            rollout.says(delivery(prompt, b"group"))
        assert (await policy.hears(p.Batch)).step == 0
        assert not task.done()


def of_two_policies():
    return Ledger(LedgerConfig(groups_per_step=2, max_steps=2, policy_members=2))

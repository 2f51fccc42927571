"""The tiny domain, whose workers kill themselves at a named point: DIE_AT = "policy-1 reduce 6 DIR/died".

The process of that name dies at that point of that step, or the first time after it, once: it creates the file first,
so that its successor lives. All hooks are set in the workers, as they build their policy or their engine; the product
has none. A policy computes in float64, where differences of rounding stay far below those of a lost or doubled sample.
From step PACED_FROM on each step waits for the file GO, each longer than the one before and at most PACE_S, so that a
run of few steps lasts until a process was started again.
"""

import asyncio
import hashlib
import json
import os
import signal
import time
from functools import wraps
from pathlib import Path

from cosmos_rl_core.testing.tiny import Tiny

STEP = -1
"""Step of the policy in this process, or deliveries of the rollout worker."""
PACED_FROM, PACE_S = 6, 30.0
NOBODY = "nobody nowhere 0 never"


def die_at(point):
    """Kill this process if it is the one, and if this is the point and the step."""
    name, wanted, step, died = os.environ.get("DIE_AT", NOBODY).split(" ", 3)
    if point != wanted or int(step) > STEP or name not in Path("/proc/self/cmdline").read_text().split("\0"):
        return
    try:
        os.close(os.open(died, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return
    os.kill(os.getpid(), signal.SIGKILL)


def stop_at(point):
    """Stop this thread, if this is the point and the process, until the test lets it go on. Only once."""
    name, wanted, reached, go = os.environ.get("STOP_AT", NOBODY).split(" ", 3)
    if point != wanted or name not in Path("/proc/self/cmdline").read_text().split("\0"):
        return
    try:
        os.close(os.open(reached, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return
    while not os.path.exists(go):
        time.sleep(0.01)


def around(owner, name, *, before="", after=""):
    """Let a function, or a coroutine function, die before or after its work."""
    work = getattr(owner, name)

    @wraps(work)
    def one(*arguments, **keywords):
        if before:
            die_at(before)
        result = work(*arguments, **keywords)
        if asyncio.iscoroutine(result):
            return awaited(result)
        if after:
            die_at(after)
        return result

    async def awaited(coroutine):
        result = await coroutine
        if after:
            die_at(after)
        return result

    setattr(owner, name, one)


def hook_policy():
    from cosmos_rl_core.checkpoint.writer import CheckpointWriter
    from cosmos_rl_core.train.learner import PolicyLearner
    from cosmos_rl_core.train.replicas import ReplicaGroup, _Receive, _Send
    from cosmos_rl_core.train.trainer import Trainer
    from cosmos_rl_core.workers.steps import PolicySteps
    from cosmos_rl_transfer.publish.server import Delivery

    count_steps(PolicySteps)
    around(Trainer, "forward_backward", before="forward")
    die_in_the_sum(ReplicaGroup)
    around(Trainer, "optim_step", after="update")
    vote_alone(PolicySteps)
    around(PolicyLearner, "optim_step", before="committed")
    if "DIGESTS" in os.environ:
        record_weights(PolicySteps, PolicyLearner)
    around(CheckpointWriter, "_write_tensors", after="saving")
    stop_before(CheckpointWriter, "_write_tensors", "saving")
    around(Delivery, "_serve", after="serving")
    die_between_buckets(Delivery)
    around(_Receive, "_take", after="healing")  # with its first piece on the way
    around(_Send, "_completed", before="sending")  # with a piece sent, and not the digest


def count_steps(steps):
    work = steps.next_batch

    async def next_batch(self, step):
        global STEP
        STEP = max(STEP, step)
        await asyncio.sleep(float(os.environ.get("PACE", 0)))
        if "GO" in os.environ and step >= PACED_FROM:
            deadline = time.monotonic() + min(PACE_S, 0.5 * (step - PACED_FROM))
            while not os.path.exists(os.environ["GO"]) and time.monotonic() < deadline:
                await asyncio.sleep(0.01)
        return await work(self, step)

    steps.next_batch = next_batch


def record_weights(steps, learner):
    """Write the digest of the weights after each step, with the mesh's epoch, to a file of this process in DIGESTS."""
    commit, optim_step = steps.commit, learner.optim_step
    epochs = []
    path = Path(os.environ["DIGESTS"], f"{os.getpid()}.jsonl")

    async def committed(self, step):
        await commit(self, step)
        epochs.append(self._epoch)

    async def stepped(self):
        step, result = self.version, await optim_step(self)
        digest = hashlib.blake2b(digest_size=16)
        for name, weight in sorted(self.trainer.policy.weights().items()):
            digest.update(name.encode() + weight.detach().numpy().tobytes())
        with path.open("a") as file:
            file.write(json.dumps([epochs[-1], step, digest.hexdigest()]) + "\n")
        return result

    steps.commit, learner.optim_step = committed, stepped


def die_in_the_sum(group):
    """With the operations of `sum` begun, and not waited for."""
    work, finish = group.sum, group._finish

    def summed(self, tensors):
        self.in_sum = True
        try:
            return work(self, tensors)
        finally:
            self.in_sum = False

    def finished(self, operations, **limits):
        if getattr(self, "in_sum", False):
            die_at("reduce")
        finish(self, operations, **limits)

    group.sum, group._finish = summed, finished


def die_between_buckets(delivery):
    """With some of the weights sent, in an engine's switch: what it reads before are deltas."""
    work = delivery._serve

    def serve(self, number, index, want):
        served = work(self, number, index, want)
        if want != "delta" and index > 5:
            die_at("half")
        return served

    delivery._serve = serve


def vote_alone(steps):
    """Die with the vote sent while the others have not voted yet: in this step they wait until it is dead."""
    work = steps.commit

    async def commit(self, step):
        name, point, wanted, died = os.environ.get("DIE_AT", NOBODY).split(" ", 3)
        if point == "voted" and step >= int(wanted):
            if name not in Path("/proc/self/cmdline").read_text().split("\0"):
                while not os.path.exists(died):
                    await asyncio.sleep(0.01)
                await asyncio.sleep(0.5)  # the controller notices it
            elif not os.path.exists(died):
                from cosmos_rl_core.control import protocol as p

                await self._link.send(p.Vote(step=step, epoch=self._epoch))
                await asyncio.sleep(0.2)  # the vote arrives
                die_at("voted")
        await work(self, step)

    steps.commit = commit


def hook_rollout():
    from cosmos_rl_core.workers.client import RemoteLeases

    around(RemoteLeases, "deliver", before="deliver", after="delivered")
    work = RemoteLeases.deliver

    async def deliver(self, lease, group, *, compared):
        global STEP
        STEP += 1
        if lease.evaluation:
            await asyncio.to_thread(stop_at, "evaluating")
        await work(self, lease, group, compared=compared)

    RemoteLeases.deliver = deliver


def watch_switches(engine):
    """Write the switches that failed in the middle to TORN, and the terms that were sampled before the next switch."""
    switch, sample = engine.switch, engine._sample
    torn, failed = Path(os.environ["TORN"]), set()

    def note(text):
        with torn.open("a") as file:
            file.write(text + "\n")

    async def switched(self, version, apply):
        try:
            await switch(self, version, apply)
            failed.discard(self)
        except ConnectionError:
            failed.add(self)
            note("switch failed")
            raise

    def sampled(self, *arguments):
        if self in failed:
            note("term sampled")
        return sample(self, *arguments)

    engine.switch, engine._sample = switched, sampled


def stop_before(owner, name, point):
    work = getattr(owner, name)

    @wraps(work)
    def stopped(*arguments, **keywords):
        stop_at(point)
        return work(*arguments, **keywords)

    setattr(owner, name, stopped)


class Dying(Tiny):
    """The domain."""

    def build_policy(self, *arguments, **keywords):
        stop_at("building")
        hook_policy()
        policy = super().build_policy(*arguments, **keywords)
        policy.module.double()
        if os.environ.get("OTHER_WEIGHTS") in Path("/proc/self/cmdline").read_text().split("\0"):
            for weight in policy.module.parameters():
                weight.data += 1.0
        return policy

    def build_engine(self, *arguments, **keywords):
        hook_rollout()
        if "TORN" in os.environ:
            from cosmos_rl_core.testing.tiny_model import TinyEngine

            watch_switches(TinyEngine)
        return super().build_engine(*arguments, **keywords)


DOMAIN = Dying()

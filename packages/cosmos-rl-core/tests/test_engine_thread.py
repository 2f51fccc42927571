"""The thread of an engine: order, new weights between steps, cancelling, errors, closing."""

import asyncio
import threading
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from cosmos_rl_core.errors import PromptError, UserError, WorkerFailed
from cosmos_rl_core.rollout.engine_thread import EngineRequest, ThreadedEngine
from cosmos_rl_core.testing.conformance import ENGINE_CHECKS
from cosmos_rl_core.types import Prompt, Rollout, Sampling

PROMPT = Prompt(sample_id=0, row={"start": 0})


@dataclass(eq=False, slots=True, kw_only=True)
class Count(EngineRequest):
    """Count to `terms`, one number a step."""

    rng: np.random.Generator
    samples: int
    terms: int
    greedy: bool
    numbers: list[np.ndarray] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)


class Gate:
    """Stops each step of an engine until it may go on."""

    def __init__(self):
        self._arrived, self._open = threading.Semaphore(0), threading.Semaphore(0)

    def pass_through(self):
        self._arrived.release()
        self._open.acquire()

    async def arrived(self):
        """The engine is in its next step."""
        await asyncio.to_thread(self._arrived.acquire)

    def open(self, steps=1):
        self._open.release(steps)


class Counter(ThreadedEngine[Count]):
    """Samples numbers for one request after the other; `gate`, where one is given, stops each step."""

    def __init__(self, gate=None):
        super().__init__("count")
        self.gate, self.weight, self.batches = gate, torch.zeros(1, requires_grad=True), []

    def weights(self):
        return {"weight": self.weight}

    async def generate(self, prompt, *, num_samples, sampling, seed):
        rng, greedy = np.random.default_rng(seed), sampling.temperature == 0
        request = Count(rng=rng, samples=num_samples, terms=sampling.max_terms, greedy=greedy)
        await self._ask(request)
        return "count", [self._rollout(request, sample) for sample in range(num_samples)]

    def _rollout(self, request, sample):
        return Rollout(
            arrays={"numbers": np.array([numbers[sample] for numbers in request.numbers])},
            rollout_logprobs=np.zeros(request.terms, np.float32),
            versions=np.array(request.versions),
            loss_mask=np.ones(request.terms, bool),
        )

    def _is_busy(self):
        return False

    def _work(self):
        if not self._waiting:
            return
        if self.gate is not None:
            self.gate.pass_through()
        self.batches.append(len(self._waiting))
        request = self._waiting[0]
        if request.samples == 13:
            return request.fail(PromptError("13 samples"))
        if request.samples == 14:
            raise ZeroDivisionError("14 samples")
        if request.samples == 15:
            raise WorkerFailed("15 samples")
        sampled = np.zeros(request.samples) if request.greedy else request.rng.random(request.samples)
        request.numbers.append(sampled)
        request.versions.append(self._version)
        self._progress += 1
        if len(request.numbers) == request.terms:
            request.finish()


def ask(engine, samples=1, terms=2, seed=0):
    return asyncio.ensure_future(
        engine.generate(PROMPT, num_samples=samples, sampling=Sampling(max_terms=terms), seed=seed)
    )


def run(work, engine):
    async def whole():
        try:
            return await asyncio.wait_for(work(engine), 30)
        finally:
            if engine.gate is not None:
                engine.gate.open(100)
            await engine.close()

    return asyncio.run(whole())


@pytest.mark.parametrize("check", ENGINE_CHECKS, ids=lambda check: check.__name__)
def test_it_keeps_the_promises_of_every_engine(check):
    asyncio.run(check(Counter, PROMPT, Sampling(max_terms=6)))


def test_requests_of_one_turn_arrive_together_and_in_order():
    async def work(engine):
        asked = [ask(engine, terms=1, seed=seed) for seed in range(3)]
        await asyncio.gather(*asked)

    engine = Counter()
    run(work, engine)
    assert engine.batches == [3, 2, 1]


def test_weights_posted_with_a_request_are_in_force_before_it():
    async def work(engine):
        asked = ask(engine, terms=3)
        switched = asyncio.ensure_future(engine.switch(5, lambda: engine.weight.fill_(2.0)))
        _, (rollout,) = await asked
        assert switched.done()
        return rollout.versions.tolist()

    assert run(work, Counter()) == [5, 5, 5]


def test_weights_are_applied_between_two_steps_in_the_engines_thread():
    gate, applied = Gate(), []

    async def work(engine):
        asked = ask(engine, terms=3)
        gate.open()
        await gate.arrived()
        await gate.arrived()
        switched = asyncio.ensure_future(engine.switch(1, lambda: applied.append(threading.current_thread().name)))
        await asyncio.sleep(0)  # it is posted
        await asyncio.sleep(0)
        assert not applied  # the second step has not ended
        gate.open(2)
        await switched
        _, (rollout,) = await asked
        return rollout.versions.tolist()

    assert run(work, Counter(gate)) == [-1, -1, 1]
    assert applied == ["count"]


def test_an_idle_engine_takes_weights_without_a_request():
    async def work(engine):
        await engine.switch(3, lambda: None)
        return engine.version, engine.progress

    assert run(work, Counter()) == (3, 0)


def test_a_request_that_waits_can_be_cancelled_and_is_never_worked_on():
    gate = Gate()

    async def work(engine):
        first, second, third = ask(engine), ask(engine), ask(engine)
        await gate.arrived()
        second.cancel()
        await asyncio.wait([second])
        assert second.cancelled()
        gate.open(4)
        await asyncio.gather(first, third)
        return engine.progress

    assert run(work, Counter(gate)) == 4


def test_a_request_that_fails_ends_alone():
    async def work(engine):
        return await asyncio.gather(ask(engine, 13), ask(engine, 2), return_exceptions=True)

    bad, (_, good) = run(work, Counter())
    assert isinstance(bad, PromptError) and len(good) == 2


def test_an_error_of_the_engine_ends_all_with_its_cause():
    async def work(engine):
        outcomes = await asyncio.gather(ask(engine, 14), ask(engine, 2), return_exceptions=True)
        with pytest.raises(RuntimeError, match="stopped") as later:
            await ask(engine)
        return [*outcomes, later.value]

    for outcome in run(work, Counter()):
        assert isinstance(outcome, RuntimeError) and isinstance(outcome.__cause__, ZeroDivisionError)


@pytest.mark.parametrize("error", [UserError("mend this"), WorkerFailed("its last words")])
def test_errors_with_a_message_for_the_user_are_raised_as_they_are(error):
    def fail():
        raise error

    async def work(engine):
        outcomes = await asyncio.gather(engine.switch(1, fail), ask(engine), return_exceptions=True)
        with pytest.raises(type(error)):
            await engine.switch(2, lambda: None)
        return outcomes, engine.version

    assert run(work, Counter()) == ([error, error], -1)


def test_closing_ends_what_waits_and_joins_the_thread():
    gate = Gate()

    async def work():
        engine = Counter(gate)
        asked = ask(engine, terms=100)
        gate.open(3)
        for _ in range(4):
            await gate.arrived()
        closing = asyncio.ensure_future(engine.close())
        await asyncio.sleep(0)
        gate.open()
        await closing
        (outcome,) = await asyncio.gather(asked, return_exceptions=True)
        assert engine.progress == 4  # the step that ran ended
        with pytest.raises(RuntimeError, match="stopped"):
            await ask(engine)
        return outcome

    assert isinstance(asyncio.run(work()), RuntimeError)
    assert "count" not in [thread.name for thread in threading.enumerate()]


def test_an_engine_closes_in_the_midst_of_a_round_that_nobody_waits_for():
    class Rounds(Counter):
        def _work(self):
            while self._waiting and self._take_posts():  # a round of several steps
                super()._work()

    async def work(engine):
        asked = ask(engine, terms=100)
        await engine.gate.arrived()
        asked.cancel()
        await asyncio.wait([asked])
        closing = asyncio.ensure_future(engine.close())
        await asyncio.sleep(0)
        engine.gate.open(2)
        await closing

    run(work, Rounds(Gate()))


def test_an_engine_that_was_never_asked_closes():
    async def work():
        engine = Counter()
        await engine.close()
        with pytest.raises(RuntimeError, match="stopped"):
            await engine.switch(0, lambda: None)

    asyncio.run(work())

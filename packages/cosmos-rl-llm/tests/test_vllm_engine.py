"""The vLLM engine on CPU, with a tiny model: one engine for all tests, since it takes half a minute to start."""

import asyncio
import copy
from contextlib import aclosing
from dataclasses import replace

import numpy as np
import pytest
import torch
from sent_weights import TOKEN, sent_weights
from tiny_engine import TokenChat

from cosmos_rl_core.episodes.interfaces import HoldsSessions, Opening
from cosmos_rl_core.errors import PromptError, UserError
from cosmos_rl_core.rollout.kv_cache import cache_argument
from cosmos_rl_core.testing.conformance import ENGINE_CHECKS, is_greedy_at_zero, is_seeded, wakes_as_it_was
from cosmos_rl_core.types import Prompt, Sampling
from cosmos_rl_core.weight_sync import OwnsSubscriber, SyncSection
from cosmos_rl_llm.engines.vllm.engine import VllmEngine
from cosmos_rl_llm.engines.vllm.options import VllmEngineOptions
from cosmos_rl_llm.engines.vllm.start import start
from cosmos_rl_llm.model.causal_lm import make_model
from cosmos_rl_llm.model.output_head import Vocabulary
from cosmos_rl_llm.policy.truncation import Repeats, Truncation

psutil = pytest.importorskip("psutil", reason="comes with vLLM")

pytest.importorskip("vllm", reason="the extra cosmos-rl-llm[vllm] is not installed")
pytestmark = [
    pytest.mark.ci,
    pytest.mark.xdist_group("vllm"),
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings(  # vLLM's own
        "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore:Unclosed context:ResourceWarning"
    ),
]

CONFIG = {
    "model_type": "qwen3",
    "vocab_size": 66,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "tie_word_embeddings": True,
}
SETTINGS = SyncSection(timeout_s=30.0)
PROMPT = Prompt(sample_id=0, row={"tokens": [3, 4, 5, 6]}, origin="rows:0")


def tiny(seed=0):
    return make_model(CONFIG, dtype=torch.float32, seed=seed).eval()


@pytest.fixture(scope="module")
def runner():
    """One event loop for all tests: vLLM stays in the one it was first used in."""
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module")
def llm(runner, tmp_path_factory):
    directory = tmp_path_factory.mktemp("tiny")
    tiny().save_pretrained(directory)
    options = VllmEngineOptions(cache_bytes=64 << 20, extra={"block_size": 32})
    llm = start(str(directory), options=options, dtype="float32", max_length=None)
    yield llm
    runner.run(asyncio.to_thread(llm.shutdown))
    llm.engine_core.resources.ctx.destroy(linger=0)  # vLLM leaves that to the garbage collector, which warns


def engine_of(llm, *, stop_ids=(), **options):
    return VllmEngine(llm, TokenChat(end_ids=frozenset(stop_ids)), **{"version": 0, **options})


async def draw(engine, prompt=PROMPT, *, num_samples=2, max_terms=24, seed=3, **sampling):
    sampling = Sampling(max_terms=max_terms, **sampling)
    return (await engine.generate(prompt, num_samples=num_samples, sampling=sampling, seed=seed))[1]


@torch.no_grad()
def logits_of(model, rollout):
    """Return [T, V] over the drawn tokens."""
    prompt, tokens = (torch.from_numpy(rollout.arrays[name]).long() for name in ("prompt_tokens", "tokens"))
    return model(torch.cat([prompt, tokens])[None]).logits[0, len(prompt) - 1 : -1]


def picked(logits, rollout):
    tokens = torch.from_numpy(rollout.arrays["tokens"]).long()
    return torch.log_softmax(logits, -1).gather(1, tokens[:, None])[:, 0].numpy()


@torch.no_grad()
def mixed_logprobs(old, new, rollout):
    """Log-probabilities when keys and values of the old model are kept and the new one goes on from there."""
    prompt, tokens = (torch.from_numpy(rollout.arrays[name]).long() for name in ("prompt_tokens", "tokens"))
    count = int((rollout.versions == rollout.versions[0]).sum())
    before = old(torch.cat([prompt, tokens[: count - 1]])[None], use_cache=True)
    after = new(tokens[None, count - 1 : -1], **{cache_argument(new): before.past_key_values})
    return picked(torch.cat([before.logits[0, len(prompt) - 1 :], after.logits[0]]), rollout)


class Shared:
    """The engine of the module, as one that was just made; closing leaves it to the next test."""

    def __init__(self, engine):
        self._engine = engine

    def __getattr__(self, name):
        return getattr(self._engine, name)

    async def close(self):
        pass


# these ask for the same bits, which vLLM does not promise when its batches differ; below log-probabilities are compared
# to 1e-4, and in test_vllm_run.py greedy tokens
CHECKS = [check for check in ENGINE_CHECKS if check not in (is_seeded, is_greedy_at_zero, wakes_as_it_was)]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_it_is_a_rollout_engine(llm, runner, check):
    runner.run(check(lambda: Shared(engine_of(llm)), PROMPT, Sampling(max_terms=12)))


def test_the_same_seed_gives_the_same_rollouts(llm, runner):
    async def work():
        engine = engine_of(llm)
        return [await draw(engine, num_samples=8, seed=seed) for seed in (1, 1, 2)]

    first, again, other = runner.run(work())
    for left, right in zip(first, again):
        assert left.arrays["tokens"].tolist() == right.arrays["tokens"].tolist()
        np.testing.assert_allclose(left.rollout_logprobs, right.rollout_logprobs, atol=1e-4)
    assert len({rollout.text for rollout in first + other}) == 16


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_are_those_of_the_model_at_the_sampling_temperature(llm, runner, temperature):
    model = tiny()
    for rollout in runner.run(draw(engine_of(llm), num_samples=4, max_terms=40, temperature=temperature)):
        expected = picked(logits_of(model, rollout) / temperature, rollout)
        np.testing.assert_allclose(rollout.rollout_logprobs, expected, atol=1e-4)


def test_logprobs_of_greedy_tokens_are_those_of_temperature_one(llm, runner):
    (rollout,) = runner.run(draw(engine_of(llm), num_samples=1, temperature=0.0))
    logits = logits_of(tiny(), rollout)
    assert rollout.arrays["tokens"].tolist() == logits.argmax(-1).tolist()
    np.testing.assert_allclose(rollout.rollout_logprobs, picked(logits, rollout), atol=1e-4)


@pytest.mark.parametrize("sampling", [{"top_k": 5}, {"top_p": 0.6}, {"top_k": 20, "top_p": 0.8, "temperature": 0.7}])
def test_the_first_ratio_is_one_with_top_k_and_top_p(llm, runner, sampling):
    truncation = Truncation.of(Sampling(max_terms=1, **sampling))
    for rollout in runner.run(draw(engine_of(llm), num_samples=4, **sampling)):
        logits = logits_of(tiny(), rollout) / sampling.get("temperature", 1.0)
        full = picked(logits, rollout)
        tokens = torch.from_numpy(rollout.arrays["tokens"]).long()
        kept = truncation.apply(logits, tokens, vocabulary=Vocabulary.all(logits.shape[1]))
        np.testing.assert_allclose(np.exp(picked(kept, rollout) - rollout.rollout_logprobs), 1, atol=2e-4)
        assert np.abs(full - rollout.rollout_logprobs).max() > 0.05


@pytest.mark.parametrize("sampling", [{}, {"top_k": 20, "top_p": 0.8, "temperature": 0.7}])
def test_the_first_ratio_is_one_with_a_repetition_penalty(llm, runner, sampling):
    truncation = Truncation.of(Sampling(max_terms=1, **sampling)) or Truncation()
    for rollout in runner.run(draw(engine_of(llm), num_samples=4, max_terms=40, repetition_penalty=1.5, **sampling)):
        logits = logits_of(tiny(), rollout) / sampling.get("temperature", 1.0)
        prompt, tokens = (torch.from_numpy(rollout.arrays[name]).long() for name in ("prompt_tokens", "tokens"))
        terms = {"tokens": torch.cat([prompt, tokens]), "logit_index": torch.arange(len(tokens)) + len(prompt) - 1}
        repeats = Repeats.of(terms, [len(prompt) + len(tokens)], penalty=1.5)
        unpenalised, vocabulary = picked(logits, rollout), Vocabulary.all(logits.shape[1])
        repeats.apply(logits, slice(None), vocabulary=vocabulary)
        kept = truncation.apply(logits, tokens, vocabulary=vocabulary)
        np.testing.assert_allclose(np.exp(picked(kept, rollout) - rollout.rollout_logprobs), 1, atol=2e-4)
        assert np.abs(unpenalised - rollout.rollout_logprobs).max() > 0.05


def test_log_probabilities_among_all_tokens_are_refused(llm, runner):
    with pytest.raises(UserError, match=r"rollout\.sampling\.renormalise = false: vLLM's log-probabilities are among"):
        runner.run(draw(engine_of(llm), top_k=5, renormalise=False))


def test_a_stop_token_ends_the_rollout_and_belongs_to_it(llm, runner):
    (free,) = runner.run(draw(engine_of(llm), num_samples=1))
    tokens = free.arrays["tokens"].tolist()
    (stopped,) = runner.run(draw(engine_of(llm, stop_ids=[tokens[6]]), num_samples=1))
    end = tokens.index(tokens[6])
    assert stopped.arrays["tokens"].tolist() == tokens[: end + 1]
    assert (free.finish_reason, stopped.finish_reason) == ("length", "stop")


def test_a_stop_string_ends_the_rollout_and_is_cut_from_its_text(llm, runner):
    (free,) = runner.run(draw(engine_of(llm), num_samples=1))
    tokens = free.arrays["tokens"].tolist()
    stop = f"{tokens[5]}><{tokens[6]}"  # starts inside one token and ends inside the next
    (stopped,) = runner.run(draw(engine_of(llm), num_samples=1, stop=("never", stop)))
    assert stopped.arrays["tokens"].tolist() == tokens[:7]
    assert len(stopped.versions) == len(stopped.rollout_logprobs) == 7
    assert stopped.finish_reason == "stop"
    assert stopped.text == TokenChat().decode(tokens[:5]) + "<"


class Requests:
    """vLLM, and the tokens of each request: those of its prompt, and how many of them were in the cache."""

    def __init__(self, llm):
        self._llm = llm
        self.prompts, self.cached = [], []

    def __getattr__(self, name):
        return getattr(self._llm, name)

    async def generate(self, prompt, *arguments, **keywords):
        self.prompts.append(list(prompt["prompt_token_ids"]))
        self.cached.append(None)
        async with aclosing(self._llm.generate(prompt, *arguments, **keywords)) as answers:
            async for answer in answers:
                self.cached[-1] = answer.num_cached_tokens
                yield answer


NOTHING = np.zeros(0, np.int32)


def opening_of(tokens):
    return Opening(terms=np.array(tokens, np.int32), text="")


@torch.no_grad()
def continued_logprobs(old, new, history, drawn, *, cached):
    """Log-probabilities of the drawn tokens, with keys and values of the old model for the first `cached` tokens."""
    row = torch.from_numpy(np.concatenate([history, drawn])).long()[None]
    if not cached:
        return _log_of(new(row).logits[0], drawn)
    before = old(row[:, :cached], use_cache=True)
    after = new(row[:, cached:], **{cache_argument(new): before.past_key_values})
    return _log_of(after.logits[0], drawn)


def _log_of(logits, drawn):
    table = logits[-len(drawn) - 1 : -1].log_softmax(-1)
    return table.gather(1, torch.from_numpy(drawn).long()[:, None])[:, 0].numpy()


def test_a_turn_follows_all_tokens_before_it_and_reads_them_from_the_cache(llm, runner):
    requests, model = Requests(llm), tiny()

    async def work():
        engine = engine_of(requests)
        assert isinstance(engine, HoldsSessions)
        session = engine.open(opening_of(range(2, 42)))
        assert session.limit == 256
        first = await session.extend(NOTHING, sampling=Sampling(max_terms=30), seed=1)
        second = await session.extend(np.arange(2, 22), sampling=Sampling(max_terms=25), seed=2)
        third = await session.extend(np.arange(30, 45), sampling=Sampling(max_terms=20), seed=3)
        with pytest.raises(PromptError, match="an episode: the prompt has 150 tokens"):
            await session.extend(NOTHING, sampling=Sampling(max_terms=120), seed=4)
        session.close()
        return first, second, third

    first, second, third = runner.run(work())
    histories = [
        np.arange(2, 42),
        np.concatenate([np.arange(2, 42), first.terms, np.arange(2, 22)]),
        np.concatenate([np.arange(2, 42), first.terms, np.arange(2, 22), second.terms, np.arange(30, 45)]),
    ]
    assert requests.prompts == [history.tolist() for history in histories]
    assert requests.cached[1:] == [64, 96]  # of 70 and 115 tokens: whole blocks of 32, without the last token drawn
    for history, turn in zip(histories, (first, second, third), strict=True):
        assert turn.finish_reason == "length" and set(turn.versions) == {0}
        expected = continued_logprobs(model, model, history, turn.terms, cached=0)
        np.testing.assert_allclose(turn.logprobs, expected, atol=1e-4)


def test_a_stop_token_ends_a_turn_and_stays_in_the_history(llm, runner):
    requests = Requests(llm)

    async def work():
        session = engine_of(requests, stop_ids=range(2, 60)).open(opening_of([3, 4, 5]))
        return [await session.extend(NOTHING, sampling=Sampling(max_terms=40), seed=seed) for seed in (1, 2)]

    first, second = runner.run(work())
    assert first.finish_reason == second.finish_reason == "stop"
    assert 2 <= first.terms[-1] < 60 and len(first.logprobs) == len(first.versions) == len(first.terms)
    assert requests.prompts[1] == [3, 4, 5, *first.terms.tolist()]


def test_new_weights_arrive_from_a_publisher(llm, runner):
    new = tiny(seed=1)

    async def work():
        engine = engine_of(llm)
        assert isinstance(engine, OwnsSubscriber)
        async with sent_weights(engine, new, SETTINGS) as send:
            await send(1)
            return await draw(engine), await draw(engine, temperature=0.0)

    drawn, greedy = runner.run(work())
    for rollout in drawn:
        assert set(rollout.versions) == {1}
        np.testing.assert_allclose(rollout.rollout_logprobs, picked(logits_of(new, rollout), rollout), atol=1e-4)
    assert greedy[0].arrays["tokens"].tolist() == logits_of(new, greedy[0]).argmax(-1).tolist()


@pytest.mark.parametrize("recompute_kv", [False, True])
def test_a_running_sequence_survives_a_switch_and_each_token_keeps_its_version(llm, runner, recompute_kv):
    old, new = tiny(seed=2), tiny(seed=3)

    async def work():
        engine = engine_of(llm, recompute_kv=recompute_kv)
        model = copy.deepcopy(old)
        async with sent_weights(engine, model, SETTINGS) as send:
            await send(4)
            running = asyncio.create_task(draw(engine, num_samples=4, max_terms=250 - len(PROMPT.row["tokens"])))
            start = engine.progress
            while engine.progress < start + 8:  # every sample has answered twice or so
                await asyncio.sleep(0)
            model.load_state_dict(new.state_dict())
            await send(5)
            return await running

    for rollout in runner.run(work()):
        assert set(rollout.versions) == {4, 5}
        assert (np.diff(rollout.versions) >= 0).all()
        before = rollout.versions == 4
        expected = mixed_logprobs(old, new, rollout)
        if recompute_kv:
            expected[~before] = picked(logits_of(new, rollout), rollout)[~before]
        np.testing.assert_allclose(rollout.rollout_logprobs, expected, atol=1e-3)


def test_prompts_of_another_version_share_no_keys_and_values(llm, runner):
    old, new = tiny(seed=4), tiny(seed=5)
    prompt = replace(PROMPT, row={"tokens": list(range(2, 62)) * 2})  # three blocks of 32 that could be shared

    async def work():
        engine = engine_of(llm)
        model = copy.deepcopy(old)
        async with sent_weights(engine, model, SETTINGS) as send:
            await send(1)
            keeps = asyncio.create_task(draw(engine, prompt, num_samples=1, max_terms=100))  # holds its blocks
            await draw(engine, prompt, num_samples=1, max_terms=2)
            model.load_state_dict(new.state_dict())
            await send(2)
            after = await draw(engine, prompt)
            await keeps
            return after

    for rollout in runner.run(work()):
        np.testing.assert_allclose(rollout.rollout_logprobs, picked(logits_of(new, rollout), rollout), atol=1e-4)


def test_cancelling_frees_the_sequences(llm, runner):
    async def work():
        engine = engine_of(llm)
        running = asyncio.create_task(draw(engine, num_samples=4, max_terms=200))
        while engine.progress < 4:
            await asyncio.sleep(0)
        running.cancel()
        await asyncio.wait([running])
        return running.cancelled(), llm.get_num_unfinished_requests(), await draw(engine, num_samples=1)

    cancelled, unfinished, rollouts = runner.run(work())
    assert cancelled and unfinished == 0
    assert len(rollouts) == 1


@pytest.mark.parametrize("recompute_kv", [False, True])
def test_a_history_survives_a_switch_between_its_turns(llm, runner, recompute_kv):
    old, new = tiny(seed=6), tiny(seed=7)
    requests = Requests(llm)

    async def work():
        engine = engine_of(requests, recompute_kv=recompute_kv)
        model = copy.deepcopy(old)
        async with sent_weights(engine, model, SETTINGS) as send:
            await send(4)
            session = engine.open(opening_of(range(4, 54)))
            first = await session.extend(NOTHING, sampling=Sampling(max_terms=30), seed=1)
            model.load_state_dict(new.state_dict())
            await send(5)
            return first, await session.extend(np.arange(5, 15), sampling=Sampling(max_terms=30), seed=2)

    first, second = runner.run(work())
    assert (set(first.versions), set(second.versions)) == ({4}, {5})
    assert requests.cached[1] == (0 if recompute_kv else 64)
    history = np.concatenate([np.arange(4, 54), first.terms, np.arange(5, 15)])
    expected = continued_logprobs(old, new, history, second.terms, cached=requests.cached[1])
    np.testing.assert_allclose(second.logprobs, expected, atol=1e-3)


def test_a_cancelled_turn_frees_its_sequence(llm, runner):
    async def work():
        engine = engine_of(llm)
        session = engine.open(opening_of([3, 4, 5]))
        running = asyncio.create_task(session.extend(NOTHING, sampling=Sampling(max_terms=200), seed=1))
        start = engine.progress
        while engine.progress == start:
            await asyncio.sleep(0)
        running.cancel()
        await asyncio.wait([running])
        return running.cancelled(), llm.get_num_unfinished_requests()

    assert runner.run(work()) == (True, 0)


def test_a_prompt_too_long_names_row_length_limit_and_key(llm, runner):
    prompt = replace(PROMPT, row={"tokens": [2] * 250})
    with pytest.raises(PromptError, match=r"rows:0.* 250 tokens .* 10 .* 256.*max_tokens.*model\.max_length"):
        runner.run(draw(engine_of(llm), prompt, max_terms=10))


def test_an_empty_prompt_is_an_error_of_the_row(llm, runner):
    with pytest.raises(PromptError, match=r"rows:0.*no tokens"):
        runner.run(draw(engine_of(llm), replace(PROMPT, row={"tokens": []})))


def test_another_sync_backend_is_refused(llm, runner):
    with pytest.raises(UserError, match=r"backend = 'other'.*transfer"):
        runner.run(engine_of(llm).subscriber("", settings=SyncSection(backend="other"), token=TOKEN))


def test_weights_that_cannot_be_applied_stop_the_engine(llm, runner):
    def fail():
        raise ZeroDivisionError("broken weights")

    async def work():
        engine = engine_of(llm)
        running = asyncio.create_task(draw(engine, max_terms=200))
        while not engine.progress:
            await asyncio.sleep(0)
        outcomes = await asyncio.gather(running, engine.switch(1, fail), return_exceptions=True)
        with pytest.raises(RuntimeError, match="stopped"):
            await draw(engine)
        await llm.resume_generation()  # for the tests that follow
        return outcomes

    for outcome in runner.run(work()):
        assert isinstance(outcome, RuntimeError)
        assert isinstance(outcome.__cause__, ZeroDivisionError)


@pytest.mark.parametrize(("call", "what"), [("pause_generation", "not pause"), ("resume_generation", "not go on")])
def test_a_vllm_that_fails_in_a_switch_stops_the_engine(llm, runner, monkeypatch, call, what):
    async def fail(**_):
        raise Exception("Call to the scheduler failed: cancelled")  # vLLM's class for a worker that was killed

    async def work():
        engine = engine_of(llm)
        with monkeypatch.context() as patched:
            patched.setattr(llm, call, fail)
            with pytest.raises(RuntimeError, match=f"stopped.*{what}"):
                await engine.switch(1, lambda: None)
        with pytest.raises(RuntimeError, match="stopped"):
            await draw(engine)
        await llm.resume_generation()  # for the tests that follow

    runner.run(work())


def test_the_end_of_a_worker_is_an_error_and_no_hang(llm, runner):
    """The last one: it leaves no engine."""

    async def work():
        engine = engine_of(llm)
        running = asyncio.create_task(draw(engine, max_terms=200))
        while not engine.progress:
            await asyncio.sleep(0)
        (worker,) = (p for p in psutil.Process().children(recursive=True) if "Worker" in p.name())
        worker.kill()
        outcomes = await asyncio.gather(running, engine.switch(1, lambda: None), return_exceptions=True)
        with pytest.raises(RuntimeError, match="stopped"):
            await draw(engine)
        await engine.close()
        return outcomes

    for outcome in runner.run(asyncio.wait_for(work(), timeout=60)):
        assert isinstance(outcome, RuntimeError)

"""The engine against plain forward passes, the policy, and its own promises."""

import asyncio
import copy
import threading

import numpy as np
import pytest
import torch
from tiny_engine import TokenChat
from transformers import RepetitionPenaltyLogitsProcessor

from cosmos_rl_core.errors import PromptError
from cosmos_rl_core.rollout.kv_cache import cache_argument
from cosmos_rl_core.types import Prompt, RolloutGroup, Sampling, Share
from cosmos_rl_llm.config import LLMTorchOptions
from cosmos_rl_llm.data.collate import collate
from cosmos_rl_llm.engines.torch.engine import TorchEngine
from cosmos_rl_llm.model.causal_lm import make_model, named_weights
from cosmos_rl_llm.policy.policy import CausalLMPolicy
from cosmos_rl_llm.policy.token_model import TermOptions
from doubles.paused_forward import PausedForward, posted

VOCAB = 66
STOP_ID = 1
BASE = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
    "tie_word_embeddings": True,
}
CONFIGS = {
    "qwen3": {**BASE, "model_type": "qwen3"},
    "llama": {**BASE, "model_type": "llama"},
    "gemma3": {
        **BASE,
        "model_type": "gemma3_text",
        "sliding_window": 6,
        "layer_types": ["sliding_attention", "full_attention"],
    },
}


def tiny(kind="qwen3", seed=0):
    return make_model(CONFIGS[kind], dtype=torch.float32, seed=seed)


def engine_of(model, *, stop_ids=(STOP_ID,), version=0, **options):
    chat = TokenChat(end_ids=frozenset(stop_ids))
    return TorchEngine(model, chat, LLMTorchOptions(**{"max_sequences": 8, **options}), version=version)


def tokens_of_passes(model):
    """The number of tokens of each forward pass from now on, in a list that grows."""
    passes = []
    model.base_model.register_forward_pre_hook(
        lambda module, inputs, keys: passes.append(keys["input_ids"].numel()), with_kwargs=True
    )
    return passes


def prompts_of(*lengths, seed=0):
    rng = np.random.default_rng(seed)
    rows = [rng.integers(2, VOCAB, length).tolist() for length in lengths]
    return [Prompt(sample_id=i, row={"tokens": row}, origin=f"rows:{i}") for i, row in enumerate(rows)]


def run(engine, work):
    """Run `await work(engine)` and close the engine."""

    async def whole():
        try:
            return await asyncio.wait_for(work(engine), timeout=60)
        finally:
            await engine.close()

    return asyncio.run(whole())


def generate_all(engine, prompts, *, num_samples=3, sampling=None, seed=11):
    sampling = sampling or Sampling(max_terms=12)

    async def work(engine):
        calls = (
            engine.generate(prompt, num_samples=num_samples, sampling=sampling, seed=seed + prompt.sample_id)
            for prompt in prompts
        )
        return [rollouts for _, rollouts in await asyncio.gather(*calls)]

    return run(engine, work)


def same_bits(left, right):
    return (
        np.array_equal(left.arrays["tokens"], right.arrays["tokens"])
        and np.array_equal(left.rollout_logprobs, right.rollout_logprobs)
        and left.finish_reason == right.finish_reason
    )


def policy_logprobs(model, prompts, groups, *, temperature=1.0):
    groups = [RolloutGroup(prompt=p, rollouts=tuple(rollouts)) for p, rollouts in zip(prompts, groups)]
    (microbatch,) = collate(groups, microbatch_terms=10**6, share=Share()).microbatches
    logprobs = CausalLMPolicy(model, TermOptions(temperature=temperature)).forward(microbatch).logprobs
    return logprobs.detach().numpy(), microbatch.terms.rollout_logprobs.numpy()


def test_a_penalty_on_repetition_is_that_of_transformers():
    """On the tokens of prompt and response."""
    model, prompts = tiny(), prompts_of(5, 9)
    reference = copy.deepcopy(model).eval()
    penalise = RepetitionPenaltyLogitsProcessor(1.5)
    sampling = Sampling(max_terms=12, temperature=0, repetition_penalty=1.5)
    groups = generate_all(engine_of(model), prompts, num_samples=1, sampling=sampling)
    changed = 0
    for prompt, (rollout,) in zip(prompts, groups):
        tokens = list(prompt.row["tokens"])
        for token in rollout.arrays["tokens"]:
            with torch.no_grad():
                logits = reference(torch.tensor([tokens])).logits[:, -1]
            changed += int(logits.argmax()) != token
            assert token == penalise(torch.tensor([tokens]), logits).argmax()
            tokens.append(int(token))
    assert changed, "the penalty chose other tokens"


@pytest.mark.parametrize("kind", CONFIGS)
def test_greedy_equals_plain_forward_passes_without_a_cache(kind):
    model, prompts = tiny(kind), prompts_of(3, 9, 1, 14)
    reference = copy.deepcopy(model).eval()
    sampling = Sampling(max_terms=10, temperature=0)
    groups = generate_all(engine_of(model), prompts, num_samples=1, sampling=sampling)
    for prompt, (rollout,) in zip(prompts, groups):
        tokens = list(prompt.row["tokens"])
        for token, logprob in zip(rollout.arrays["tokens"], rollout.rollout_logprobs):
            with torch.no_grad():
                table = torch.log_softmax(reference(torch.tensor([tokens])).logits[0, -1], -1)
            assert token == table.argmax()
            assert logprob == pytest.approx(table[token].item(), abs=1e-4)
            tokens.append(int(token))


@pytest.mark.parametrize("kind", CONFIGS)
def test_logprobs_equal_the_policys_with_more_requests_than_slots(kind):
    model, prompts = tiny(kind), prompts_of(5, 17, 2, 30, 8, 4, 11, 23)
    reference = copy.deepcopy(model)
    sampling = Sampling(max_terms=20, temperature=0.9)
    engine = engine_of(model, stop_ids=range(0, VOCAB, 12))  # sequences come and go at different steps
    groups = generate_all(engine, prompts, num_samples=3, sampling=sampling)
    expected, found = policy_logprobs(reference, prompts, groups, temperature=0.9)
    np.testing.assert_allclose(found, expected, atol=1e-4)


def test_rollouts_hold_what_the_types_say():
    (prompt,) = prompts_of(4)
    (rollouts,) = generate_all(engine_of(tiny(), version=7), [prompt], num_samples=8)
    for rollout in rollouts:
        tokens = rollout.arrays["tokens"]
        assert rollout.arrays["prompt_tokens"].tolist() == prompt.row["tokens"]
        assert rollout.arrays["prompt_tokens"].dtype == tokens.dtype == rollout.versions.dtype == np.int32
        assert rollout.rollout_logprobs.dtype == np.float32
        assert len(tokens) == len(rollout.versions) == len(rollout.loss_mask) == rollout.num_terms
        assert set(rollout.versions) == {7} and rollout.loss_mask.all()
        assert rollout.text == TokenChat().decode(tokens)
        stopped = tokens[-1] == STOP_ID
        assert rollout.finish_reason == ("stop" if stopped else "length")
        assert stopped or len(tokens) == 12
        assert STOP_ID not in tokens[:-1]


def test_the_prompt_comes_back_as_text():
    (prompt,) = prompts_of(3)

    async def work(engine):
        return await engine.generate(prompt, num_samples=1, sampling=Sampling(max_terms=1), seed=0)

    text, _ = run(engine_of(tiny()), work)
    assert text == TokenChat().decode(prompt.row["tokens"])


def test_a_groups_prompt_is_prefilled_once():
    model = tiny()
    engine, passes = engine_of(model, stop_ids=[]), tokens_of_passes(model)
    generate_all(engine, prompts_of(10, 6), num_samples=4, sampling=Sampling(max_terms=5))
    assert passes == [16, 8, 8, 8, 8]  # each sample's first term comes from the prefill
    assert engine.progress == 1 + 4


def test_a_group_larger_than_the_batch_is_cut():
    """Its first samples have the bits of a group that fits: no sample depends on the others of its batch."""
    (prompt,) = prompts_of(6)
    cut, fits = (
        generate_all(engine_of(tiny(), max_sequences=4, batch_invariant=True), [prompt], num_samples=count)[0]
        for count in (10, 4)
    )
    assert len(cut) == 10
    assert all(same_bits(a, b) for a, b in zip(cut, fits))
    assert len({sample.arrays["tokens"].tobytes() for sample in cut}) > len(fits), "the first part came again"


def test_the_same_submissions_give_the_same_bits():
    prompts = prompts_of(5, 17, 2, 30)
    first, second = (generate_all(engine_of(tiny()), prompts) for _ in range(2))
    assert all(same_bits(a, b) for one, two in zip(first, second) for a, b in zip(one, two))


def test_a_rollout_does_not_depend_on_what_runs_beside_it():
    prompts = prompts_of(5, 17, 4, 30)
    together = generate_all(engine_of(tiny(), batch_invariant=True), prompts)
    for prompt, group in zip(prompts, together):
        (alone,) = generate_all(engine_of(tiny(), batch_invariant=True), [prompt])
        assert all(same_bits(a, b) for a, b in zip(alone, group))


def test_samples_of_a_group_and_seeds_differ():
    (prompt,) = prompts_of(5)
    (one,) = generate_all(engine_of(tiny()), [prompt], seed=1, num_samples=4)
    (two,) = generate_all(engine_of(tiny()), [prompt], seed=2, num_samples=4)
    assert len({rollout.text for rollout in one + two}) == 8


def test_first_tokens_follow_the_models_distribution():
    model, (prompt,) = tiny(), prompts_of(5)
    with torch.no_grad():
        logits = copy.deepcopy(model)(torch.tensor([prompt.row["tokens"]])).logits[0, -1]
    engine = engine_of(model, max_sequences=4000)
    (rollouts,) = generate_all(engine, [prompt], num_samples=4000, sampling=Sampling(max_terms=1))
    counts = np.bincount([rollout.arrays["tokens"][0] for rollout in rollouts], minlength=VOCAB)
    expected = 4000 * torch.softmax(logits, -1).numpy()
    common = expected >= 5
    statistic = ((counts - expected)[common] ** 2 / expected[common]).sum()
    freedom = common.sum()
    assert statistic < freedom + 3.1 * np.sqrt(2 * freedom)  # about the 0.999 quantile


def test_a_stop_string_ends_the_rollout_and_is_cut_from_its_text():
    (prompt,) = prompts_of(6)
    (free,) = generate_all(engine_of(tiny(), stop_ids=[]), [prompt], num_samples=1)
    tokens = free[0].arrays["tokens"].tolist()
    stop = f"{tokens[5]}><{tokens[6]}"  # starts inside one token and ends inside the next
    sampling = Sampling(max_terms=12, stop=("never", stop))
    ((stopped,),) = generate_all(engine_of(tiny(), stop_ids=[]), [prompt], num_samples=1, sampling=sampling)
    assert stopped.arrays["tokens"].tolist() == tokens[:7]
    assert stopped.finish_reason == "stop"
    assert stopped.text == TokenChat().decode(tokens[:5]) + "<"


def test_new_weights_are_taken_between_two_terms():
    model, prompts = tiny(), prompts_of(6, 9)
    old, new = copy.deepcopy(model), tiny(seed=1)
    paused = PausedForward(model.base_model)

    async def work(engine):
        sampling = Sampling(max_terms=50)
        calls = [asyncio.ensure_future(engine.generate(p, num_samples=2, sampling=sampling, seed=3)) for p in prompts]
        await paused.reached()
        switch = await posted(engine.switch(4, lambda: copy_weights(named_weights(new), engine.weights())))
        paused.go()
        await switch
        assert engine.version == 4
        return [rollout for call in calls for rollout in (await call)[1]]

    rollouts = run(engine_of(model, stop_ids=[], version=3), work)
    for rollout in rollouts:
        assert set(rollout.versions) == {3, 4}
        assert (np.diff(rollout.versions) >= 0).all()
        np.testing.assert_allclose(rollout.rollout_logprobs, mixed_logprobs(old, new, rollout), atol=1e-4)


def copy_weights(source, target):
    for name, tensor in source.items():
        target[name].copy_(tensor)


@torch.no_grad()
def mixed_logprobs(old, new, rollout):
    """Log-probabilities when the old model's keys and values are kept and the new model goes on from there."""
    prompt, tokens = (torch.from_numpy(rollout.arrays[k]).long() for k in ("prompt_tokens", "tokens"))
    count = int((rollout.versions == 3).sum())
    head = torch.cat([prompt, tokens[: count - 1]])[None]
    before = old(head, use_cache=True)
    after = new(tokens[None, count - 1 : -1], **{cache_argument(new): before.past_key_values})
    logits = torch.cat([before.logits[0, len(prompt) - 1 :], after.logits[0]])
    return torch.log_softmax(logits, -1).gather(1, tokens[:, None])[:, 0].numpy()


def test_a_switch_to_the_same_weights_changes_only_versions():
    prompts = prompts_of(6, 9)
    undisturbed = generate_all(engine_of(tiny()), prompts)

    async def work(engine):
        calls = [
            asyncio.ensure_future(
                engine.generate(p, num_samples=3, sampling=Sampling(max_terms=12), seed=11 + p.sample_id)
            )
            for p in prompts
        ]
        for version in range(1, 6):
            await engine.switch(version, lambda: None)
        return [(await call)[1] for call in calls]

    switched = run(engine_of(tiny()), work)
    assert all(same_bits(a, b) for one, two in zip(undisturbed, switched) for a, b in zip(one, two))


def test_cancelling_frees_the_sequences():
    long, short = prompts_of(4, 5)

    async def work(engine):
        sampling = Sampling(max_terms=59)
        calls = [
            asyncio.ensure_future(engine.generate(long, num_samples=8, sampling=sampling, seed=0)) for _ in range(2)
        ]
        await paused.reached()
        for call in calls:
            call.cancel()
        await asyncio.wait(calls)
        paused.go()
        _, rollouts = await engine.generate(short, num_samples=8, sampling=Sampling(max_terms=2), seed=0)
        assert all(call.cancelled() for call in calls)
        return rollouts

    model = tiny()
    paused = PausedForward(model.base_model)
    engine, passes = engine_of(model, stop_ids=[]), tokens_of_passes(model)
    assert len(run(engine, work)) == 8
    assert [tokens for tokens in passes if tokens != 8] == [4, 5]  # prompts; the one that waited never started


def test_a_prompt_too_long_names_row_length_limit_and_key():
    with pytest.raises(PromptError, match=r"rows:0.* 60 tokens .* 5 .* 64.*max_tokens.*model\.max_length"):
        generate_all(engine_of(tiny()), prompts_of(60), sampling=Sampling(max_terms=5))


def test_an_empty_prompt_is_an_error_of_the_row():
    with pytest.raises(PromptError, match=r"rows:0.*no tokens"):
        generate_all(engine_of(tiny()), prompts_of(0))


def test_a_prompt_that_never_fits_into_the_cache_names_the_key():
    with pytest.raises(PromptError, match=r"rows:0.*cache_bytes"):
        generate_all(engine_of(tiny(), cache_bytes=1000), prompts_of(20))


def test_a_small_cache_makes_requests_wait():
    prompts = prompts_of(20, 4, 25)
    generous = generate_all(engine_of(tiny()), prompts)
    bytes_per_term = 2 * 2 * 2 * 32 * 4  # keys and values, layers, heads, head_dim, float32
    tight = generate_all(engine_of(tiny(), cache_bytes=4 * 64 * bytes_per_term), prompts)
    assert all(same_bits(a, b) for one, two in zip(generous, tight) for a, b in zip(one, two))


def test_an_error_in_the_engine_reaches_everyone_who_waits():
    long, short = prompts_of(4, 5)

    def fail():
        raise ZeroDivisionError("broken weights")

    async def work(engine):
        call = asyncio.ensure_future(engine.generate(long, num_samples=2, sampling=Sampling(max_terms=59), seed=0))
        await paused.reached()
        switch = await posted(engine.switch(1, fail))
        paused.go()
        outcomes = await asyncio.gather(call, switch, return_exceptions=True)
        with pytest.raises(RuntimeError, match="stopped"):
            await engine.generate(short, num_samples=1, sampling=Sampling(max_terms=2), seed=0)
        return outcomes

    model = tiny()
    paused = PausedForward(model.base_model)
    for outcome in run(engine_of(model, stop_ids=[]), work):
        assert isinstance(outcome, RuntimeError)
        assert isinstance(outcome.__cause__, ZeroDivisionError)


def test_closing_fails_what_waits_and_joins_the_thread():
    (prompt,) = prompts_of(4)

    async def work():
        model = tiny()
        paused = PausedForward(model.base_model)
        engine = engine_of(model, stop_ids=[])
        call = asyncio.ensure_future(engine.generate(prompt, num_samples=2, sampling=Sampling(max_terms=59), seed=0))
        await paused.reached()
        closing = await posted(engine.close())
        paused.go()
        await closing
        (outcome,) = await asyncio.gather(call, return_exceptions=True)
        return outcome

    assert isinstance(asyncio.run(work()), RuntimeError)
    assert not [t for t in threading.enumerate() if t.name.startswith("torch-engine")]

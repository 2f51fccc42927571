"""The sampler draws from the distribution it reports."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cosmos_rl_core.types import Sampling
from cosmos_rl_llm.engines.torch.sampling import Sampler, penalise, uniforms


def draw(logits, rows, *, seed=0, position=0):
    """One draw a row of [n, V] logits; row i is sample i of `seed`."""
    n, vocab_size = logits.shape
    sampler = Sampler.of(rows, vocab_size=vocab_size)
    counters = np.full(n, seed), np.arange(n), np.full(n, position)
    return sampler.sample(logits.clone(), torch.from_numpy(uniforms(*counters)))


def chi_square(counts, probabilities):
    expected = probabilities * counts.sum()
    seen = expected > 0
    return float(((counts[seen] - expected[seen]) ** 2 / expected[seen]).sum())


def test_uniforms_are_in_the_open_interval_and_evenly_spread():
    u = uniforms(np.full(100_000, 7), np.arange(100_000), np.zeros(100_000, dtype=int))
    assert u.min() > 0 and u.max() < 1
    counts = np.histogram(u, bins=20, range=(0, 1))[0]
    assert chi_square(counts, np.full(20, 0.05)) < 43.8  # the 0.999 quantile at 19 degrees of freedom


def test_each_part_of_the_counter_changes_the_number():
    seeds, samples, positions = np.array([0, 1, 0, 0]), np.array([0, 0, 1, 0]), np.array([0, 0, 0, 1])
    assert len(set(uniforms(seeds, samples, positions))) == 4


def test_seeds_of_64_bits_are_told_apart():
    seeds = np.array([2**64 - 1, 2**63 - 1, 2**32 - 1], dtype=np.uint64)
    assert len(set(uniforms(seeds, np.zeros(3, int), np.zeros(3, int)))) == 3


def test_frequencies_follow_the_softmax_at_the_temperature():
    logits = torch.tensor([1.0, 0.0, -1.0, 2.0, 0.5])
    tokens, _ = draw(logits.expand(40_000, 5), [Sampling(max_terms=1, temperature=0.7)] * 40_000)
    counts = torch.bincount(tokens, minlength=5).numpy()
    assert chi_square(counts, torch.softmax(logits / 0.7, 0).numpy()) < 18.5  # 0.999 at 4 degrees of freedom


def test_large_vocabularies_are_inverted_block_by_block():
    probabilities = torch.zeros(5000)
    probabilities[torch.tensor([0, 255, 256, 2047, 4999])] = torch.tensor([0.1, 0.2, 0.3, 0.15, 0.25])
    tokens, logprobs = draw(probabilities.log().expand(20_000, 5000), [Sampling(max_terms=1)] * 20_000)
    counts = torch.bincount(tokens, minlength=5000).numpy()
    assert counts.sum() == counts[[0, 255, 256, 2047, 4999]].sum()  # nothing of probability 0
    assert chi_square(counts, probabilities.numpy()) < 18.5
    torch.testing.assert_close(logprobs, probabilities.log()[tokens], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("vocab_size", [3, 2000])
def test_extreme_uniforms_give_tokens_that_have_mass(vocab_size):
    logits = torch.full((2, vocab_size), -torch.inf)
    logits[:, 1] = 0.0
    sampler = Sampler.of([Sampling(max_terms=1)] * 2, vocab_size=vocab_size)
    tokens, logprobs = sampler.sample(logits, torch.tensor([2.0**-54, 1 - 2.0**-53], dtype=torch.float64))
    assert tokens.tolist() == [1, 1]
    assert logprobs.tolist() == [0.0, 0.0]


def test_greedy_rows_take_the_likeliest_and_report_temperature_one():
    logits = torch.tensor([[0.0, 3.0, 1.0], [5.0, 0.0, 0.0]])
    tokens, logprobs = draw(logits, [Sampling(max_terms=1, temperature=0)] * 2)
    assert tokens.tolist() == [1, 0]
    torch.testing.assert_close(logprobs, torch.log_softmax(logits, -1)[[0, 1], [1, 0]])


def test_logprobs_are_those_at_the_temperature():
    logits = torch.randn(50, 30, generator=torch.Generator().manual_seed(0))
    tokens, logprobs = draw(logits, [Sampling(max_terms=1, temperature=1.7)] * 50)
    expected = torch.log_softmax(logits / 1.7, -1).gather(1, tokens[:, None])[:, 0]
    torch.testing.assert_close(logprobs, expected)


def test_top_k_keeps_the_k_likeliest_and_renormalises():
    logits = torch.tensor([0.1, 2.0, 1.0, 0.0, 1.5])
    tokens, logprobs = draw(logits.expand(20_000, 5), [Sampling(max_terms=1, top_k=2)] * 20_000)
    assert set(tokens.tolist()) == {1, 4}
    kept = torch.log_softmax(logits[[1, 4]], 0)
    torch.testing.assert_close(logprobs, torch.where(tokens == 1, kept[0], kept[1]))
    counts = torch.bincount(tokens, minlength=5)[[1, 4]].numpy()
    assert chi_square(counts, kept.exp().numpy()) < 10.8  # 0.999 at 1 degree of freedom


def test_top_p_keeps_the_fewest_tokens_that_reach_it():
    probabilities = torch.tensor([0.1, 0.5, 0.15, 0.25])
    tokens, logprobs = draw(probabilities.log().expand(5000, 4), [Sampling(max_terms=1, top_p=0.7)] * 5000)
    assert set(tokens.tolist()) == {1, 3}  # 0.5 < 0.7 <= 0.5 + 0.25
    torch.testing.assert_close(logprobs.exp(), torch.where(tokens == 1, 0.5, 0.25) / 0.75)


def test_top_p_is_taken_of_what_top_k_left():
    probabilities = torch.tensor([0.4, 0.3, 0.2, 0.1])
    sampling = Sampling(max_terms=1, top_k=2, top_p=0.5)
    tokens, logprobs = draw(probabilities.log().expand(100, 4), [sampling] * 100)
    assert set(tokens.tolist()) == {0}  # 0.4 / 0.7 >= 0.5
    assert logprobs.abs().max() < 1e-6


def test_top_p_looks_beyond_its_first_candidates():
    logits = torch.zeros(1, 3000)  # all alike: 0.9 of the mass needs 2700 tokens
    sampling = Sampling(max_terms=1, top_p=0.9)
    _, logprobs = draw(logits, [sampling])
    assert logprobs.item() == pytest.approx(-np.log(2700), abs=1e-3)


def test_rows_of_different_sampling_share_a_batch():
    logits = torch.randn(1, 40, generator=torch.Generator().manual_seed(1)).expand(4, 40)
    rows = [
        Sampling(max_terms=1),
        Sampling(max_terms=1, temperature=0),
        Sampling(max_terms=1, top_k=1),
        Sampling(max_terms=1, temperature=0.5, top_p=0.8),
    ]
    sampler = Sampler.of(rows, vocab_size=40)
    together = sampler.sample(logits.clone(), torch.full((4,), 0.37, dtype=torch.float64))
    for i, row in enumerate(rows):
        alone = Sampler.of([row], vocab_size=40).sample(logits[:1].clone(), torch.tensor([0.37], dtype=torch.float64))
        assert alone[0].item() == together[0][i].item()
        assert alone[1].item() == pytest.approx(together[1][i].item(), abs=1e-6)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    size=st.integers(1, 1500),
    top_k=st.integers(0, 20),
    top_p=st.floats(0.05, 1.0),
)
def test_a_drawn_token_is_always_a_kept_one(seed, size, top_k, top_p):
    logits = 4 * torch.randn(3, size, generator=torch.Generator().manual_seed(seed))
    tokens, logprobs = draw(logits, [Sampling(max_terms=1, top_k=top_k, top_p=top_p)] * 3, seed=seed)
    rank = (logits > logits.gather(1, tokens[:, None])).sum(-1)
    assert (rank < (top_k or size)).all()
    assert (logprobs <= 1e-6).all() and logprobs.isfinite().all()
    full = torch.log_softmax(logits, -1).gather(1, tokens[:, None])[:, 0]
    assert (logprobs >= full - 1e-4).all()  # renormalising only adds mass


def test_tokens_that_a_sequence_has_are_penalised_once():
    logits = torch.tensor([3.0, -2.0, 0.5, 1.0])
    penalise(logits, [0, 1, 1, 0], 2.0)
    assert logits.tolist() == [1.5, -4.0, 0.5, 1.0]

"""Attention of a decode step gives a row the same bits however long the longest sequence of the batch is."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from cosmos_rl_llm.engines.torch.cache import DecodeLayout, span_unit
from cosmos_rl_llm.model.causal_lm import make_model
from cosmos_rl_llm.policy.attention import Scoring

THREADS = [1, 2, 3, 7]


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def drawn(*shape: int) -> Tensor:
    return 3 * torch.randn(*shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("count", THREADS)
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(2, 2, 8), (4, 4, 12), (6, 2, 64), (8, 1, 128)])
def test_rows_do_not_depend_on_the_span_that_is_read(heads, kv_heads, head_dim, count):
    sizes = {"hidden_size": 64, "num_hidden_layers": 1, "vocab_size": 32, "num_attention_heads": heads}
    model = make_model({"model_type": "qwen3", **sizes, "head_dim": head_dim}, dtype=torch.float32, seed=0)
    unit, places, scoring = span_unit(model), torch.tensor([0, 7, 31, 15, 20]), Scoring(scale=0.3)
    query = drawn(5, heads, 1, head_dim)
    keys, values = drawn(2, 5, kv_heads, 8 * unit, head_dim)

    def attend(rows: int, span: int) -> Tensor:
        layout = DecodeLayout(place=places[:rows], span=span)
        return layout.attend(query[:rows], keys[:rows, :, :span], values[:rows, :, :span], scoring)

    with threads(count):
        far = attend(5, 8 * unit)
        assert all(torch.equal(attend(rows, span), far[:rows]) for rows in (4, 5) for span in (unit, 3 * unit))

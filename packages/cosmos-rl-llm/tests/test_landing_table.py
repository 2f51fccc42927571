"""The rules of the table on layers written by hand. No vLLM."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from cosmos_rl_llm.engines.vllm.weight_map.names import VllmNames
from cosmos_rl_llm.engines.vllm.weight_map.table import place
from cosmos_rl_transfer.layout.manifest import Box


class ColumnParallelLinear(nn.Module):
    """Has what the rules ask vLLM's class of this name for."""

    def __init__(self, rows: int, columns: int, *, tp_rank: int = 0, tp_size: int = 1, **sizes: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, columns, device="meta"))
        self.bias = nn.Parameter(torch.empty(rows, device="meta"))
        self.tp_rank, self.tp_size = tp_rank, tp_size
        self.__dict__.update(sizes)


class MergedColumnParallelLinear(ColumnParallelLinear):
    pass


class QKVParallelLinear(ColumnParallelLinear):
    pass


class RowParallelLinear(ColumnParallelLinear):
    pass


class VocabParallelEmbedding(ColumnParallelLinear):
    pass


class Odd(ColumnParallelLinear):
    def weight_loader(self) -> None: ...


class Model(nn.Module):
    def __init__(self, name: str, layer: nn.Module) -> None:
        super().__init__()
        self.packed_modules_mapping = {
            "qkv_proj": ["q_proj", "k_proj", "v_proj"],
            "gate_up_proj": ["gate_proj", "up_proj"],
        }
        self.add_module(name, layer)


def found(model: nn.Module, name: str, *shape: int) -> list[tuple[Box, str, int]] | None:
    places = place(VllmNames(model), name, shape)
    return None if places is None else [(p.box, p.parameter, p.start) for p in places]


def test_columns_are_cut_by_rows():
    model = Model("up", ColumnParallelLinear(4, 6, tp_rank=1, tp_size=2))
    assert found(model, "up.weight", 8, 6) == [(Box((4, 0), (4, 6)), "up.weight", 0)]
    assert found(model, "up.bias", 8) == [(Box((4,), (4,)), "up.bias", 0)]


def test_rows_are_cut_by_columns_and_their_bias_is_whole():
    model = Model("down", RowParallelLinear(6, 4, tp_rank=1, tp_size=2))
    assert found(model, "down.weight", 6, 8) == [(Box((0, 4), (6, 4)), "down.weight", 0)]
    assert found(model, "down.bias", 6) == [(Box((0,), (6,)), "down.bias", 0)]


def test_a_tensor_of_another_width_is_not_guessed_at():
    model = Model("up", ColumnParallelLinear(4, 6, tp_rank=1, tp_size=2))
    assert found(model, "up.weight", 10, 6) is None


def test_merged_columns_lie_one_under_the_other():
    model = Model("gate_up_proj", MergedColumnParallelLinear(8, 6, tp_rank=1, tp_size=2, output_sizes=[6, 10]))
    assert found(model, "gate_proj.weight", 6, 6) == [(Box((3, 0), (3, 6)), "gate_up_proj.weight", 0)]
    assert found(model, "up_proj.weight", 10, 6) == [(Box((5, 0), (5, 6)), "gate_up_proj.weight", 18)]


def test_columns_merged_in_the_checkpoint_are_one_box_on_one_rank_alone():
    whole = Model("gate_up_proj", MergedColumnParallelLinear(8, 6, output_sizes=[4, 4]))
    assert found(whole, "gate_up_proj.weight", 8, 6) == [(Box((0, 0), (8, 6)), "gate_up_proj.weight", 0)]
    half = Model("gate_up_proj", MergedColumnParallelLinear(4, 6, tp_size=2, output_sizes=[4, 4]))
    assert found(half, "gate_up_proj.weight", 8, 6) is None


@pytest.mark.parametrize(("rank", "head"), [(0, 0), (1, 0), (2, 1), (3, 1)])
def test_ranks_share_a_key_head_when_there_are_few(rank, head):
    layer = QKVParallelLinear(
        12, 6, tp_rank=rank, tp_size=4, num_heads=1, num_kv_heads=1, head_size=4, v_head_size=4, num_kv_head_replicas=2
    )
    model = Model("qkv_proj", layer)
    assert found(model, "q_proj.weight", 16, 6) == [(Box((4 * rank, 0), (4, 6)), "qkv_proj.weight", 0)]
    assert found(model, "k_proj.weight", 8, 6) == [(Box((4 * head, 0), (4, 6)), "qkv_proj.weight", 24)]
    assert found(model, "v_proj.bias", 8) == [(Box((4 * head,), (4,)), "qkv_proj.bias", 8)]


@pytest.mark.parametrize(("start", "end"), [(0, 64), (64, 100), (100, 100)])
def test_a_vocabulary_ends_before_its_padding(start, end):
    shard = SimpleNamespace(org_vocab_start_index=start, org_vocab_end_index=end)
    model = Model("embed", VocabParallelEmbedding(64, 6, shard_indices=shard, org_vocab_size=100))
    ((box, _, _),) = found(model, "embed.weight", 100, 6) or []
    assert box.shape == ((end - start, 6) if end > start else (0, 0))


def test_a_parameter_of_no_known_class_is_replicated_if_it_has_the_shape_and_no_loader():
    norm = nn.LayerNorm(6)
    assert found(Model("norm", norm), "norm.weight", 6) == [(Box((0,), (6,)), "norm.weight", 0)]
    assert found(Model("norm", norm), "norm.weight", 12) is None
    norm.weight.weight_loader = norm.forward  # type: ignore[attr-defined]
    assert found(Model("norm", norm), "norm.weight", 6) is None


def test_a_subclass_with_a_loader_of_its_own_is_not_known():
    assert found(Model("up", Odd(4, 6)), "up.weight", 4, 6) is None


def test_an_alias_is_fed_by_its_first_name():
    model = Model("embed", VocabParallelEmbedding(64, 6))
    model.add_module("head", model.get_submodule("embed"))
    assert found(model, "head.weight", 64, 6) == []


def test_a_name_the_model_does_not_have_is_not_known():
    assert found(Model("up", ColumnParallelLinear(4, 6)), "down.weight", 4, 6) is None

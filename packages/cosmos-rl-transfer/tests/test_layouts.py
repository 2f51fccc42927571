import pytest

from cosmos_rl_core.types import WeightSpec
from cosmos_rl_transfer.errors import LayoutError
from cosmos_rl_transfer.layout import spread
from cosmos_rl_transfer.layout.manifest import Box, Manifest, TensorLayout


def spec(name, *shape):
    return WeightSpec(name=name, shape=shape, dtype="bfloat16")


MODEL = [
    spec("model.embed_tokens.weight", 100, 8),
    *(
        one
        for i in range(4)
        for one in (
            spec(f"model.layers.{i}.self_attn.q_proj.weight", 16, 8),
            spec(f"model.layers.{i}.self_attn.k_proj.weight", 4, 8),
            spec(f"model.layers.{i}.self_attn.o_proj.weight", 8, 16),
            spec(f"model.layers.{i}.mlp.down_proj.weight", 8, 24),
            spec(f"model.layers.{i}.input_layernorm.weight", 8),
        )
    ),
    spec("model.norm.weight", 8),
    spec("lm_head.weight", 100, 8),
]
EXPERTS = [
    spec("model.layers.0.self_attn.q_proj.weight", 16, 8),
    *(spec(f"model.layers.0.mlp.experts.{e}.up_proj.weight", 6, 8) for e in range(8)),
]


def boxes(manifest, name):
    return next(layout.boxes for layout in manifest.layouts if layout.spec.name == name)


def test_ddp_gives_every_rank_everything():
    made = spread.mesh(MODEL, dp_replicate=3)
    assert all(layout.boxes.keys() == {0, 1, 2} for layout in made.layouts)
    assert boxes(made, "lm_head.weight")[2] == Box((0, 0), (100, 8))


def test_fsdp_cuts_dim_0_unevenly():
    assert [b.shape[0] for b in boxes(spread.mesh(MODEL, dp_shard=3), "lm_head.weight").values()] == [34, 34, 32]


def test_hsdp_repeats_fsdp():
    held = boxes(spread.mesh(MODEL, dp_replicate=2, dp_shard=3), "lm_head.weight")
    assert [held[r] for r in (3, 4, 5)] == [held[r] for r in (0, 1, 2)]


def test_tp_cuts_outputs_of_some_and_inputs_of_others():
    made = spread.mesh(MODEL, tp=4)
    assert boxes(made, "model.layers.0.self_attn.q_proj.weight")[1] == Box((4, 0), (4, 8))
    assert boxes(made, "model.layers.0.self_attn.o_proj.weight")[1] == Box((0, 4), (8, 4))
    assert boxes(made, "model.norm.weight")[1] == Box((0,), (8,))


def test_kv_heads_are_copied_where_there_are_more_ranks():
    held = boxes(spread.mesh(MODEL, tp=8, kv_heads=2), "model.layers.0.self_attn.k_proj.weight")
    assert [held[r].offset[0] for r in range(8)] == [0, 0, 0, 0, 2, 2, 2, 2]
    assert {b.shape for b in held.values()} == {(2, 8)}


def test_ranks_that_are_no_multiple_of_the_kv_heads_are_refused():
    with pytest.raises(LayoutError, match="tp = 6 is no multiple of 4 KV heads"):
        spread.mesh(MODEL, tp=6, kv_heads=4)


def test_a_vocabulary_is_cut_as_if_it_were_padded():
    held = boxes(spread.mesh(MODEL, tp=4, vocab_multiple=64), "lm_head.weight")
    assert [b.shape[0] for b in held.values()] == [32, 32, 32, 4]


def test_a_rank_of_nothing_but_padding_is_left_out():
    assert boxes(spread.mesh(MODEL, tp=8, vocab_multiple=256), "lm_head.weight").keys() == {0, 1, 2, 3}


def test_fsdp_over_tp_cuts_what_tp_left():
    held = boxes(spread.mesh(MODEL, dp_shard=2, tp=4), "model.layers.0.self_attn.q_proj.weight")
    assert [held[r].offset[0] for r in range(8)] == [0, 4, 8, 12, 2, 6, 10, 14]


def test_context_ranks_cut_parameters_as_fsdp_ranks_do():
    assert spread.mesh(MODEL, dp_shard=2, cp=2) == spread.mesh(MODEL, dp_shard=4)


def test_stages_hold_runs_of_layers_with_the_embedding_first_and_the_head_last():
    made = spread.mesh(MODEL, pp=2)
    first = {s.name for s, _ in made.held_by(0)}
    assert "model.embed_tokens.weight" in first and "model.layers.1.mlp.down_proj.weight" in first
    assert {s.name for s, _ in made.held_by(1)} == {s.name for s in MODEL} - first
    assert list(made.specs) == [s.name for s in MODEL]


def test_more_stages_than_layers_are_refused():
    with pytest.raises(LayoutError, match="4 layers cannot be cut into 5 stages"):
        spread.mesh(MODEL, pp=5)


def test_experts_lie_whole_on_neighbours():
    made = spread.mesh(EXPERTS, tp=4, ep=4)
    assert [list(boxes(made, f"model.layers.0.mlp.experts.{e}.up_proj.weight")) for e in (0, 1, 2, 7)] == [
        [0],
        [0],
        [1],
        [3],
    ]
    assert boxes(made, EXPERTS[0].name)[1] == Box((4, 0), (4, 8))


def test_ranks_beyond_the_experts_cut_them():
    made = spread.mesh(EXPERTS, dp_shard=4, ep=2)
    assert boxes(made, "model.layers.0.mlp.experts.4.up_proj.weight") == {
        1: Box((0, 0), (3, 8)),
        3: Box((3, 0), (3, 8)),
    }


def test_stacked_experts_are_cut_along_dim_0():
    held = boxes(
        spread.mesh([spec("model.layers.0.mlp.experts.down_proj", 8, 6, 4)], tp=2, ep=2),
        "model.layers.0.mlp.experts.down_proj",
    )
    assert held == {0: Box((0, 0, 0), (4, 6, 4)), 1: Box((4, 0, 0), (4, 6, 4))}


def test_replicas_count_on_and_are_known():
    made = spread.replicas(spread.mesh(MODEL, tp=2, first_rank=10), 3)
    assert made.replicas == ((10, 11), (12, 13), (14, 15))
    held = boxes(made, "lm_head.weight")
    assert held[15] == held[11] and list(held) == sorted(held)


def test_a_replica_alone_is_what_was_repeated():
    one = spread.mesh(MODEL, tp=2)
    assert spread.replicas(one, 3).only([0, 1]) == one


def test_ranks_without_replicas_are_one_copy():
    assert spread.mesh(MODEL, tp=2).copies == ((0, 1),)


def test_scalars_are_copied():
    made = spread.mesh([spec("step")], dp_shard=2, tp=2)
    assert made == Manifest((TensorLayout(spec("step"), dict.fromkeys(range(4), Box((), ()))),))

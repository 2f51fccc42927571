"""A policy spread over ranks trains as one process does: losses, gradients and weights after five steps, to 1e-5."""

from functools import cache

import llm_parity as parity
import numpy as np
import pytest

from cosmos_rl_core.parallel.dims import ParallelDims
from doubles.ranks import run_ranks

SEQUENCE = {"sequence_parallel": True}
INTERLEAVED = {"pipeline_schedule": "interleaved_1f1b", "stages_per_rank": 2}


@cache
def alone(family, algorithm="grpo", packed=True, num_layers=2):
    return parity.train(family, algorithm=algorithm, packed=packed, num_layers=num_layers)


def check(family, dims, *, parallel=None, memory=None, **options):
    ranks = run_ranks(
        parity.train_rank,
        ParallelDims(**dims).world_size,
        family=family,
        dims=dims,
        parallel=parallel,
        memory=memory,
        **options,
    )
    parity.assert_equal(alone(family, **options), ranks)


def test_training_alone_moves_every_weight():
    after, before = alone("qwen3-moe"), parity.train("qwen3-moe", num_steps=0)
    moved = {name: np.abs(after[name] - before[name]).max() for name in before if name.startswith("weight/")}
    assert min(moved.values()) > 1e-4, min(moved, key=moved.__getitem__)


def test_a_difference_is_found_and_named():
    expected = alone("qwen3")
    wrong = {**expected, "weight/model.norm.weight": expected["weight/model.norm.weight"] + 3e-3}
    with pytest.raises(AssertionError, match=r"^weight/model\.norm\.weight: 2\.9"):
        parity.assert_equal(expected, [wrong])
    broken = {name: np.full_like(metric, np.nan) for name, metric in expected.items()}
    with pytest.raises(AssertionError, match=r": inf"):
        parity.assert_equal(expected, [expected, broken])


@pytest.mark.parametrize(
    ("family", "dims", "parallel", "options"),
    [
        ("qwen3", {"dp_shard": 2}, None, {}),
        ("llama", {"dp_replicate": 2}, None, {"algorithm": "sft", "packed": False}),
        pytest.param("llama", {"tp": 2}, None, {}, marks=pytest.mark.slow),
        pytest.param("qwen3", {"tp": 2}, SEQUENCE, {"algorithm": "sft"}, marks=pytest.mark.slow),
        ("qwen3-moe", {"tp": 2}, SEQUENCE, {}),
        ("qwen3", {"cp": 2}, None, {}),
        ("llama", {"pp": 2}, None, {"algorithm": "sft"}),
        ("qwen3-moe", {"dp_shard": 2, "ep": 2}, None, {"packed": False}),
        ("llama", {"dp_shard": 2, "tp": 2}, None, {"packed": False}),
        ("qwen3", {"dp_shard": 2}, None, {"algorithm": "dpo"}),
        ("llama", {"tp": 2}, SEQUENCE, {"algorithm": "dpo"}),
        ("qwen3", {"pp": 2}, None, {"algorithm": "dpo", "packed": False}),
    ],
)
def test_ranks_train_as_one_process(family, dims, parallel, options):
    check(family, dims, parallel=parallel, **options)


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["grpo", "sft"])
@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen3-moe"])
@pytest.mark.parametrize("axis", ["dp_shard", "dp_replicate", "tp", "cp", "pp", "ep"])
def test_each_axis_alone(axis, family, packed, algorithm):
    if axis == "ep" and family != "qwen3-moe":
        pytest.skip("a dense model has no experts")
    dims = {"dp_shard": 2, "ep": 2} if axis == "ep" else {axis: 2}
    check(family, dims, packed=packed, algorithm=algorithm)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "dims", "parallel", "options"),
    [
        ("llama", {"dp_replicate": 2, "dp_shard": 2}, None, {}),
        ("qwen3", {"pp": 2, "dp_shard": 2}, None, {}),
        ("llama", {"tp": 4}, SEQUENCE, {"algorithm": "sft"}),
        ("llama", {"cp": 2, "tp": 2}, SEQUENCE, {}),
        ("qwen3", {"dp_shard": 2, "cp": 2}, None, {"packed": False}),
        ("qwen3", {"dp_replicate": 2, "tp": 2}, SEQUENCE, {}),
        ("llama", {"pp": 2, "tp": 2}, SEQUENCE, {}),
        ("qwen3", {"pp": 2, "cp": 2}, None, {"algorithm": "sft"}),
        ("qwen3", {"pp": 2, "dp_shard": 2}, INTERLEAVED, {"num_layers": 4}),
        ("qwen3-moe", {"dp_shard": 2, "cp": 2, "ep": 4}, None, {}),
        ("qwen3-moe", {"dp_shard": 2, "tp": 2, "ep": 2}, SEQUENCE, {}),
        ("qwen3-moe", {"pp": 2, "dp_shard": 2, "ep": 2}, None, {"algorithm": "sft"}),
        ("qwen3", {"dp_replicate": 2, "dp_shard": 2, "tp": 2}, SEQUENCE, {}),
        ("qwen3", {"dp_shard": 2, "pp": 2, "cp": 2}, INTERLEAVED, {"num_layers": 4}),
        ("llama", {"dp_shard": 2, "cp": 2, "tp": 2}, SEQUENCE, {"packed": False}),
        ("llama", {"pp": 2, "dp_shard": 2, "tp": 2}, SEQUENCE, {}),
        ("qwen3-moe", {"pp": 2, "dp_shard": 2, "tp": 2, "ep": 2}, SEQUENCE, {}),
        ("llama", {"dp_shard": 8}, None, {"packed": False}),  # some ranks have a microbatch that trains nothing
    ],
)
def test_axes_together(family, dims, parallel, options):
    check(family, dims, parallel=parallel, **options)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gemma3_text", "gpt-oss", "deepseek-v3"])
@pytest.mark.parametrize("parallel", [None, SEQUENCE])
def test_other_families_over_tp(family, parallel):
    check(family, {"dp_shard": 2, "tp": 2}, parallel=parallel)


@pytest.mark.slow
@pytest.mark.parametrize("parallel", [{"reduce_once": True}, {"reshard_after_forward": False}])
def test_options_of_traffic_change_nothing(parallel):
    check("qwen3", {"dp_replicate": 2, "dp_shard": 2}, parallel=parallel)


@pytest.mark.slow
@pytest.mark.parametrize(
    "memory",
    [
        {"activation_checkpointing": "full"},
        {"activation_checkpointing": "selective"},
        {"parameter_offload": True, "activation_offload": True},
    ],
)
def test_options_of_memory_change_nothing(memory):
    check("qwen3-moe", {"dp_shard": 2, "tp": 2, "ep": 2}, parallel=SEQUENCE, memory=memory)

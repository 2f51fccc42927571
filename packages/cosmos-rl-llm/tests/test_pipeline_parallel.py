"""A model in stages against the same model in one process. `test_parallel_parity.py` mixes pp with other axes."""

import numpy as np
import pytest
import torch
from llm_parity import assert_equal, make_batch, make_tiny, train, train_rank

from cosmos_rl_core.errors import UserError
from cosmos_rl_core.parallel.config import ParallelSection
from cosmos_rl_core.parallel.dims import ParallelDims
from cosmos_rl_core.parallel.dtensor import whole
from cosmos_rl_core.parallel.mesh import ReplicaMesh
from cosmos_rl_core.parallel.setup import ModelSetup
from cosmos_rl_core.types import Share
from cosmos_rl_llm.config import LLMLoraSection
from cosmos_rl_llm.domain import LLM
from cosmos_rl_llm.model.causal_lm import load_model, make_model, named_weights
from cosmos_rl_llm.policy.pipelined import PassThrough, PipelinedPolicy, cut_model
from cosmos_rl_llm.policy.policy import CausalLMPolicy
from cosmos_rl_llm.tiny import write_tiny_model
from doubles.ranks import run_ranks

INTERLEAVED = {"pipeline_schedule": "interleaved_1f1b", "stages_per_rank": 2}
TIED = "model.embed_tokens.weight"


@pytest.mark.parametrize(
    ("family", "parallel", "options"),
    [
        ("llama", {"pipeline_schedule": "gpipe"}, {"num_layers": 3}),
        ("qwen3", INTERLEAVED, {"num_layers": 5}),
        ("qwen3", {}, {"num_layers": 2, "lora": {"rank": 4}}),
    ],
)
def test_stages_train_as_one_process_does(family, parallel, options):
    if "lora" in options:
        pytest.importorskip("peft")
    options = {"num_steps": 3, **options}
    ranks = run_ranks(train_rank, 2, family=family, dims={"pp": 2}, parallel=parallel, **options)
    assert_equal(train(family, **plain(options)), ranks)


def plain(options):
    """What `train` takes for the plain values that `train_rank` takes."""
    lora = {"lora": LLMLoraSection.model_validate(options["lora"])} if "lora" in options else {}
    return {**options, **lora}


def first_batch():
    return make_batch(0, share=Share(), supervised=False, microbatch_terms=48).microbatches


def loss_of(outputs, microbatch):
    return -(microbatch.terms.advantages * outputs.logprobs).sum()


def observed(rank, world_size, *, family, num_layers, **section):
    """What a stage shows before and after a step of plain gradient descent."""
    parallel = ParallelSection(pp=world_size, **section)
    mesh = ReplicaMesh.build(ParallelDims.of(parallel, world_size=world_size), device=torch.device("cpu"))
    policy = PipelinedPolicy(make_tiny(family, num_layers=num_layers), setup=ModelSetup(mesh=mesh, parallel=parallel))
    outputs = policy.forward(first_batch()[0], with_entropy=True)
    policy.forward_backward(first_batch(), loss=loss_of, with_entropy=False)
    torch.optim.SGD(policy.module.parameters(), lr=0.1).step()
    weights = {name: whole(tensor).numpy() for name, tensor in policy.weights().items()}
    shown = {"logprobs": outputs.logprobs.numpy(), "entropy": outputs.entropy.numpy()}
    return weights | shown | policy.metrics() | {"copies": len(policy.second_copies())}


@pytest.fixture(scope="module")
def tied():
    return run_ranks(observed, 2, family="qwen3", num_layers=2)


def test_the_last_stage_tells_the_log_probabilities(tied):
    with torch.no_grad():
        wanted = CausalLMPolicy(make_tiny("qwen3")).forward(first_batch()[0], with_entropy=True)
    first, last = tied
    np.testing.assert_allclose(last["logprobs"], wanted.logprobs.numpy(), atol=1e-5)
    np.testing.assert_allclose(last["entropy"], wanted.entropy.numpy(), atol=1e-5)
    assert first["logprobs"].shape == last["logprobs"].shape and not first["logprobs"].any()


def test_both_copies_of_a_tied_matrix_stay_the_same_to_the_last_bit(tied):
    first, last = tied
    assert np.array_equal(first[TIED], last[TIED])
    assert not np.array_equal(first[TIED], make_tiny("qwen3").get_parameter(TIED).detach().numpy())
    assert "lm_head.weight" not in last
    assert (first["copies"], last["copies"]) == (0, 1)


def test_the_load_of_experts_is_that_of_all_stages():
    ranks = run_ranks(observed, 2, family="qwen3-moe", num_layers=4, **INTERLEAVED)
    policy = CausalLMPolicy(make_tiny("qwen3-moe", num_layers=4))
    policy.forward_backward(first_batch(), loss=loss_of, with_entropy=False)
    wanted = policy.metrics()
    for rank in ranks:
        assert {name: rank[name] for name in wanted} == pytest.approx(wanted)


def read_in_parts(rank, world_size, *, directory, **section):
    parallel = ParallelSection(pp=world_size, **section)
    mesh = ReplicaMesh.build(ParallelDims.of(parallel, world_size=world_size), device=torch.device("cpu"))
    policy = LLM.build_policy(
        LLM.Model(path=directory),
        data=LLM.Data(path="unread.jsonl", chat_template="none"),
        sampling=None,
        seed=0,
        setup=ModelSetup(mesh=mesh, parallel=parallel),
    )
    return {name: whole(tensor).numpy() for name, tensor in policy.weights().items()}


def test_a_stage_reads_its_own_weights(tmp_path):
    directory = write_tiny_model(tmp_path)
    ranks = run_ranks(read_in_parts, 2, directory=str(directory), **INTERLEAVED)
    wanted = named_weights(load_model(directory, dtype=torch.float32))
    assert ranks[0].keys() | ranks[1].keys() == wanted.keys()
    assert ranks[0].keys() & ranks[1].keys() == {TIED}
    for rank in ranks:
        assert all(np.array_equal(value, wanted[name].numpy()) for name, value in rank.items())


def test_names_and_layers_of_a_stage_are_those_of_the_whole_model():
    section = ParallelSection.model_validate({"pp": 2, **INTERLEAVED})
    union = make_tiny("llama", num_layers=5)
    names = dict(union.named_parameters())
    stages = cut_model(union, section=section, stage=1)
    assert [i for i, layer in enumerate(union.model.layers) if not isinstance(layer, PassThrough)] == [1, 2, 4]
    assert all(names[name] is parameter for name, parameter in union.named_parameters())
    held = [dict(stage.named_parameters()) for stage in stages]
    assert held[0].keys().isdisjoint(held[1])
    assert all(union.get_parameter(name) is parameter for part in held for name, parameter in part.items())
    assert held[0].keys() | held[1].keys() == {name for name, _ in union.named_parameters()}
    assert {"model.norm.weight", "lm_head.weight"} <= held[1].keys()


def test_more_stages_than_layers_are_refused():
    with pytest.raises(UserError, match="6 stages, but the model has 5 layers"):
        cut_model(make_tiny("llama", num_layers=5), section=ParallelSection(pp=6), stage=0)


def test_a_model_without_a_plan_is_refused():
    config = {"model_type": "gpt2", "vocab_size": 7, "n_embd": 8, "n_layer": 2, "n_head": 2, "n_positions": 16}
    with pytest.raises(UserError, match=r"no pipeline plan .* GPT2LMHeadModel .*; set pp = 1"):
        cut_model(make_model(config, dtype=torch.float32, seed=0), section=ParallelSection(pp=2), stage=0)

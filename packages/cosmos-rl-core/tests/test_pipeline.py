from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import nn

from cosmos_rl_core.errors import UserError
from cosmos_rl_core.parallel.axes.tied import tied_gradients
from cosmos_rl_core.parallel.config import ParallelSection
from cosmos_rl_core.parallel.dims import ParallelDims
from cosmos_rl_core.parallel.mesh import ReplicaMesh
from cosmos_rl_core.parallel.pipeline import Pipeline, PolicyStage
from cosmos_rl_core.parallel.stages import cut_layers, microbatch_multiple, num_stages
from cosmos_rl_core.types import Microbatch, PolicyOutputs, TermBatch
from doubles.ranks import run_ranks

VOCABULARY, HIDDEN, LAYERS = 7, 6, 4


class Layers(nn.ModuleDict):
    """Some layers, the embedding before the first and the head after the last."""

    def forward(self, hidden, tokens):
        if "embed" in self:
            hidden = self["embed"](tokens)
        for name, layer in self.items():
            if name.isdigit():
                hidden = hidden + torch.tanh(layer(hidden))
        return torch.log_softmax(self["head"](hidden)[0], -1) if "head" in self else hidden


@dataclass
class ToyStage(PolicyStage):
    """A part of a model that reads tokens [1, L] and tells the log-probability of `labels` [L, 1]."""

    module: Layers

    def prepare(self, microbatch):
        return microbatch.inputs

    def hidden_shape(self, inputs):
        return (*inputs["tokens"].shape, HIDDEN)

    def __call__(self, hidden, inputs, *, with_entropy):
        passed = self.module(hidden, inputs["tokens"])
        if "head" not in self.module:
            return passed
        entropy = -(passed.exp() * passed).sum(-1) if with_entropy else None
        return PolicyOutputs(logprobs=passed.gather(1, inputs["labels"])[:, 0], entropy=entropy)


def toy_stages(count, *, tied=False):
    torch.manual_seed(0)
    layers = [nn.Linear(HIDDEN, HIDDEN) for _ in range(LAYERS)]
    embed, head = nn.Embedding(VOCABULARY, HIDDEN), nn.Linear(HIDDEN, VOCABULARY, bias=False)
    if tied:
        head.weight = embed.weight
    stages = [Layers({str(i): layers[i] for i in part}) for part in cut_layers(LAYERS, count)]
    stages[0]["embed"], stages[-1]["head"] = embed, head
    return [ToyStage(stage) for stage in stages]


def microbatch(length, seed):
    random = torch.Generator().manual_seed(seed)
    terms = TermBatch(
        rollout_logprobs=torch.zeros(length),
        advantages=torch.randn(length, generator=random),
        loss_mask=torch.ones(length),
        rollout_index=torch.zeros(length, dtype=torch.int64),
        num_rollouts=1,
    )
    tokens = torch.randint(VOCABULARY, (2, length + 1), generator=random)
    return Microbatch(inputs={"tokens": tokens[:1, :length], "labels": tokens[1, :length, None]}, terms=terms)


def loss_of(outputs, batch):
    entropy = 0.0 if outputs.entropy is None else 0.1 * outputs.entropy.sum()
    return -(batch.terms.advantages * outputs.logprobs).sum() - entropy


def gradients(stages):
    named = {name: p for stage in stages for name, p in stage.module.named_parameters()}
    return {name: p.grad.numpy().copy() for name, p in named.items()}


def one_process(lengths, *, with_entropy=False, tied=False):
    (stage,) = toy_stages(1, tied=tied)
    losses = []
    for seed, length in enumerate(lengths):
        batch = microbatch(length, seed)
        loss = loss_of(stage(None, batch.inputs, with_entropy=with_entropy), batch)
        loss.backward()
        losses.append(loss.item())
    return losses, gradients([stage])


def pipeline_of(section, *, tied=False):
    mesh = ReplicaMesh.build(ParallelDims.of(section, world_size=None), device=torch.device("cpu"))
    mine = toy_stages(num_stages(section), tied=tied)[mesh.stage :: section.pp]
    return mine, Pipeline(mine, section=section, mesh=mesh, hidden_dtype=torch.float32), mesh


def trained(rank, world_size, *, steps, with_entropy, **section):
    """Gradients over `steps`, each a list of lengths."""
    mine, pipeline, _ = pipeline_of(ParallelSection(pp=world_size, **section))
    losses = []

    def loss(outputs, batch):
        losses.append(loss_of(outputs, batch))
        return losses[-1]

    seeds = iter(range(100))
    for lengths in steps:
        batches = [microbatch(length, next(seeds)) for length in lengths]
        pipeline.forward_backward(batches, loss=loss, with_entropy=with_entropy)
    return gradients(mine) | {"losses": [x.item() for x in losses]}


@pytest.mark.parametrize(
    ("pp", "section"),
    [
        (2, {"pipeline_schedule": "gpipe"}),
        (2, {"pipeline_schedule": "1f1b"}),
        (4, {"pipeline_schedule": "1f1b"}),
        (2, {"pipeline_schedule": "interleaved_1f1b", "stages_per_rank": 2}),
    ],
)
def test_ragged_rows_in_any_number_have_the_gradients_of_one_process(pp, section):
    steps = [[5, 9, 2, 7], [3, 4], [8, 1, 6, 6, 2, 11], [2, 3, 4, 5]]
    ranks = run_ranks(trained, pp, steps=steps, with_entropy=True, **section)
    losses, wanted = one_process([length for step in steps for length in step], with_entropy=True)
    assert ranks[-1]["losses"] == pytest.approx(losses, rel=1e-6)
    assert all(len(rank["losses"]) == 0 for rank in ranks[:-1])
    found = {name: value for rank in ranks for name, value in rank.items() if name != "losses"}
    assert found.keys() == wanted.keys()
    for name, gradient in wanted.items():
        np.testing.assert_allclose(found[name], gradient, rtol=1e-5, atol=1e-6, err_msg=name)


def test_one_microbatch_is_enough_for_1f1b():
    ranks = run_ranks(trained, 2, steps=[[5]], with_entropy=False, pipeline_schedule="1f1b")
    _, wanted = one_process([5])
    np.testing.assert_allclose(ranks[0]["embed.weight"], wanted["embed.weight"], rtol=1e-5, atol=1e-6)


def evaluated(rank, world_size, **section):
    _, pipeline, _ = pipeline_of(ParallelSection(pp=world_size, **section))
    outputs = [pipeline.forward(microbatch(length, length), with_entropy=True) for length in (4, 9)]
    assert pipeline.is_last == all(found is not None for found in outputs)
    return {str(i): found.logprobs.numpy() for i, found in enumerate(outputs) if found is not None}


@pytest.mark.parametrize("section", [{}, {"pipeline_schedule": "interleaved_1f1b", "stages_per_rank": 2}])
def test_a_forward_pass_gives_the_last_stage_the_log_probabilities(section):
    first, last = run_ranks(evaluated, 2, **section)
    (whole,) = toy_stages(1)
    assert not first
    for i, length in enumerate((4, 9)):
        batch = microbatch(length, length)
        wanted = whole(None, batch.inputs, with_entropy=False).logprobs.detach().numpy()
        np.testing.assert_allclose(last[str(i)], wanted, rtol=1e-6)


def tied(rank, world_size):
    mine, pipeline, mesh = pipeline_of(ParallelSection(pp=world_size), tied=True)
    module = mine[0].module
    ends = [module[name].weight for name in ("embed", "head") if name in module]
    for lengths in ((3, 5, 4), (2, 6)):
        with tied_gradients(ends, mesh=mesh):
            pipeline.forward_backward([microbatch(n, n) for n in lengths], loss=loss_of, with_entropy=False)
    return {"gradient": ends[0].grad.numpy()} if ends else {}


def test_a_tied_matrix_has_the_same_whole_gradient_on_both_ends():
    ranks = run_ranks(tied, 3)
    (whole,) = toy_stages(1, tied=True)
    for length in (3, 5, 4, 2, 6):
        batch = microbatch(length, length)
        loss_of(whole(None, batch.inputs, with_entropy=False), batch).backward()
    assert np.array_equal(ranks[0]["gradient"], ranks[2]["gradient"])
    np.testing.assert_allclose(ranks[0]["gradient"], whole.module["embed"].weight.grad.numpy(), rtol=1e-5, atol=1e-6)


def sharded(rank, world_size, *, reduce_once, **section):
    from torch.distributed.fsdp import fully_shard

    parallel = ParallelSection(dp_shard=2, reduce_once=reduce_once, **section)
    mesh = ReplicaMesh.build(ParallelDims.of(parallel, world_size=world_size), device=torch.device("cpu"))
    mine = toy_stages(num_stages(parallel))[mesh.stage :: parallel.pp]
    for stage in mine:
        for unit in (*(layer for name, layer in stage.module.items() if name.isdigit()), stage.module):
            fully_shard(unit, mesh=mesh.fsdp)
            unit.set_gradient_divide_factor(1.0)
            unit.set_force_sum_reduction_for_comms(True)
    pipeline = Pipeline(mine, section=parallel, mesh=mesh, hidden_dtype=torch.float32)
    for step in ([5, 9, 2, 7], [3, 4, 8, 1]):
        share = [microbatch(length, length) for length in step[mesh.share.index :: 2]]
        pipeline.forward_backward(share, loss=loss_of, with_entropy=False)
    named = {name: p for stage in mine for name, p in stage.module.named_parameters()}
    return {name: p.grad.full_tensor().numpy() for name, p in named.items()}


@pytest.mark.parametrize("reduce_once", [False, True])
@pytest.mark.parametrize(
    "section", [{"pp": 2}, {"pp": 2, "pipeline_schedule": "interleaved_1f1b", "stages_per_rank": 2}]
)
def test_stages_may_be_fully_sharded(reduce_once, section):
    ranks = run_ranks(sharded, 4, reduce_once=reduce_once, **section)
    (whole,) = toy_stages(1)
    for length in (5, 9, 2, 7, 3, 4, 8, 1):
        batch = microbatch(length, length)
        loss_of(whole(None, batch.inputs, with_entropy=False), batch).backward()
    for rank in ranks:
        for name, gradient in rank.items():
            wanted = whole.module.get_parameter(name).grad.numpy()
            np.testing.assert_allclose(gradient, wanted, rtol=1e-5, atol=1e-6, err_msg=name)


def test_layers_are_spread_evenly_with_embedding_and_head_as_layers():
    sizes = {(4, 2): [2, 2], (6, 4): [1, 2, 2, 1], (4, 4): [1, 1, 1, 1], (5, 2): [3, 2], (28, 4): [7, 8, 7, 6]}
    for (layers, stages), wanted in sizes.items():
        parts = cut_layers(layers, stages)
        assert [len(part) for part in parts] == wanted
        assert [i for part in parts for i in part] == list(range(layers))


def test_more_stages_than_layers_are_refused_with_both_numbers():
    with pytest.raises(UserError, match="8 stages, but the model has 6 layers"):
        cut_layers(6, 8)


def test_several_stages_a_rank_need_the_interleaved_schedule():
    with pytest.raises(UserError, match="stages_per_rank = 2 with pp = 2"):
        num_stages(ParallelSection(pp=2, stages_per_rank=2))
    assert num_stages(ParallelSection(pp=2, stages_per_rank=2, pipeline_schedule="interleaved_1f1b")) == 4


def test_only_the_interleaved_schedule_minds_the_number_of_microbatches():
    assert microbatch_multiple(ParallelSection(pp=4)) == 1
    assert microbatch_multiple(ParallelSection(pp=4, pipeline_schedule="interleaved_1f1b", stages_per_rank=2)) == 4

"""The loss on held-out rows: its value, over ranks, and when it is measured."""

import math
from functools import partial

import pytest
import torch

from cosmos_rl_core.data.source import PromptSource
from cosmos_rl_core.parallel.dims import ParallelDims
from cosmos_rl_core.parallel.mesh import ReplicaMesh
from cosmos_rl_core.parallel.setup import ModelSetup
from cosmos_rl_core.recipe.sections import EvalSection
from cosmos_rl_core.testing.tiny_model import TinyPolicy, build_network, collate_answers
from cosmos_rl_core.testing.tiny_task import TinyModel, wanted
from cosmos_rl_core.train.validation import Validation
from cosmos_rl_core.types import Share
from doubles.ranks import run_ranks

MODEL = TinyModel()
ROWS = [{"context": context} for context in range(7)]


def validation(*, share=None, mesh=None, rows=ROWS, rows_at_once=3):
    answers = partial(collate_answers, actions=MODEL.actions, length=3, microbatch_terms=4, share=share or Share())
    policy = TinyPolicy(MODEL, temperature=1.0, setup=ModelSetup(mesh=mesh))
    return Validation(
        policy,
        source=PromptSource(rows, origin="rows", shuffle=False, epochs=1),
        rows_at_once=rows_at_once,
        collate=lambda prompts: answers([prompt.row for prompt in prompts]),
        mesh=mesh,
    )


def test_the_loss_by_hand():
    network = build_network(MODEL)
    losses = []
    for row in ROWS:
        for place in range(3):
            logits = network(torch.tensor([row["context"]]), torch.tensor([place]))[0]
            losses.append(-logits.log_softmax(-1)[wanted(row["context"], place, actions=MODEL.actions)].item())
    metrics = validation().measure()
    assert metrics["eval/loss"] == pytest.approx(sum(losses) / 21, rel=1e-6)
    assert metrics["eval/perplexity"] == pytest.approx(math.exp(sum(losses) / 21), rel=1e-6)
    assert (metrics["eval/rows"], metrics["eval/terms"]) == (7, 21)


def test_nothing_is_left_on_the_weights():
    measured = validation()
    measured.measure()
    assert all(parameter.grad is None for parameter in measured._policy.module.parameters())


def measure(rank, world_size):
    mesh = ReplicaMesh.build(ParallelDims(dp_shard=world_size), device=torch.device("cpu"))
    return validation(share=mesh.share, mesh=mesh).measure()


def test_ranks_with_a_share_each_find_the_same_loss_together():
    alone = validation().measure()
    for metrics in run_ranks(measure, 2):
        assert {name: float(value) for name, value in metrics.items()} == pytest.approx(alone, rel=1e-9)


@pytest.mark.parametrize(
    ("every_steps", "last", "due"), [(0, 5, {0, 5}), (2, 5, {0, 2, 4, 5}), (3, None, {0, 3}), (0, None, {0})]
)
def test_evaluations_come_first_every_so_often_and_last(every_steps, last, due):
    section = EvalSection(every_steps=every_steps, data={})
    assert {version for version in range(6) if section.due(version, last=last)} == due


def test_without_held_out_rows_nothing_is_due():
    assert not EvalSection(every_steps=1).due(0, last=5)


@pytest.mark.parametrize(("limit", "count"), [(None, 200), (5, 5), (500, 200), (0.01, 2), (0.001, 1), (0.999, 199)])
def test_a_limit_is_a_number_of_rows_or_a_share(limit, count):
    assert EvalSection(limit=limit).first(range(200)) == range(count)


@pytest.mark.parametrize("limit", [0, -3, 0.0, 1.5])
def test_a_limit_that_is_neither_is_refused(limit):
    with pytest.raises(ValueError, match="limit"):
        EvalSection(limit=limit)

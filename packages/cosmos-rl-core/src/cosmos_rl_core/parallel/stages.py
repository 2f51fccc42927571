"""Assigns layers to the stages of a pipeline, and stages to its ranks. Pure arithmetic.

rank of stage s = s % pp          pp 2, stages_per_rank 2:   rank 0 has stages 0 and 2, rank 1 has 1 and 3
"""

from __future__ import annotations

from cosmos_rl_core.errors import UserError
from cosmos_rl_core.parallel.config import ParallelSection


def num_stages(section: ParallelSection) -> int:
    """Return pp x stages_per_rank; 1 without a pipeline. Raises UserError where the schedule needs one stage a rank."""
    if section.stages_per_rank > 1 and (section.pp == 1 or section.pipeline_schedule != "interleaved_1f1b"):
        raise UserError(
            f"[policy.parallel] stages_per_rank = {section.stages_per_rank} with pp = {section.pp} and "
            f'pipeline_schedule = "{section.pipeline_schedule}": several stages a rank need pp above 1 and '
            '"interleaved_1f1b"; set stages_per_rank = 1'
        )
    return section.pp * section.stages_per_rank


def microbatch_multiple(section: ParallelSection) -> int:
    """Return the number that has to divide the microbatches of a step.

    GPipe and 1F1B take any number; interleaved 1F1B runs pp microbatches at a time through the stages.
    """
    return section.pp if section.pp > 1 and section.pipeline_schedule == "interleaved_1f1b" else 1


def cut_layers(num_layers: int, num_stages: int) -> list[range]:
    """Return the layers of each stage, as even as possible; every stage has one.

    The embedding and the head count as a layer each: six layers over four stages are 1, 2, 2, 1. Of equally
    loaded stages the earlier gets the layer, for the head costs more than the embedding.

    Raises:
        UserError: more stages than layers.
    """
    if num_stages > num_layers:
        raise UserError(
            f"[policy.parallel] pp x stages_per_rank = {num_stages} stages, but the model has {num_layers} layers: "
            f"set them to at most {num_layers} stages"
        )
    # Each stage starts with one layer, and the ends with the embedding and the head beside it. Each further layer goes
    # to the first of the least loaded stages. A stage's layers are consecutive, so that only their number is chosen.
    loads = [1] * num_stages
    loads[0] += 1
    loads[-1] += 1
    sizes = [1] * num_stages
    for _ in range(num_layers - num_stages):
        least = loads.index(min(loads))
        loads[least] += 1
        sizes[least] += 1
    ends = [sum(sizes[: stage + 1]) for stage in range(num_stages)]
    return [range(end - size, end) for end, size in zip(ends, sizes, strict=True)]

"""Write docs/families.md: transformers' causal language models that can be trained, each tested in a small size.

.venv/bin/python scripts/model_families.py                        # one rank: write the page
.venv/bin/python scripts/model_families.py --check                # exit 1 if it is out of date
.venv/bin/python scripts/model_families.py qwen3 ...              # test some kinds and print the results
.venv/bin/python scripts/model_families.py --over tp --over ep    # two ranks of an axis: write its column
.venv/bin/python scripts/model_families.py --over tp qwen3 ...    # some kinds, also those that the page has
.venv/bin/python scripts/model_families.py --over tp --check ...  # exit 1 if the page has other results

For each kind: log-probabilities and gradients of packed rollouts with shared prompts, by `CausalLMPolicy`, against
transformers' own forward pass in eval mode, one sequence at a time. A kind must match, or be refused with a
UserError; otherwise the script ends with an error.

With --over: the check at the start of a run over ranks (`rank_probe`), and for a kind that it takes for right the same
comparison on other rollouts. The page is written after each kind, and kinds that have a result are left out, so that
a sweep that was stopped goes on. A page of another version of transformers loses its results over ranks.
"""

from __future__ import annotations

import argparse
import logging
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import transformers
from torch import Tensor
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from cosmos_rl_core.errors import UserError
from cosmos_rl_core.parallel.config import ParallelSection
from cosmos_rl_core.parallel.dims import ParallelDims
from cosmos_rl_core.parallel.mesh import ReplicaMesh
from cosmos_rl_core.parallel.setup import ModelSetup
from cosmos_rl_core.types import Share
from cosmos_rl_llm.data.collate import TrainSequence, pack_batch
from cosmos_rl_llm.engines.torch.engine import check_generation
from cosmos_rl_llm.model.miniature import VOCABULARY, miniature
from cosmos_rl_llm.policy.policy import CausalLMPolicy
from cosmos_rl_llm.policy.probe import TOLERANCE, plain_logprobs
from cosmos_rl_llm.policy.rank_probe import GRADIENT_TOLERANCE as RANKS_GRADIENT_TOLERANCE
from cosmos_rl_llm.policy.rank_probe import check_ranks, compare_ranks

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "tests" / "shared"))

from doubles.ranks import RankFailed, preload, run_ranks  # noqa: E402

PAGE = ROOT / "docs" / "families.md"
LOGPROB_TOLERANCE = 2e-5
"""In nats."""
GRADIENT_TOLERANCE = 1e-4
"""Relative to the largest gradient of the model."""
AXES: Mapping[str, Mapping[str, int]] = {
    "dp_shard": {"dp_shard": 2},
    "tp": {"tp": 2},
    "cp": {"cp": 2},
    "pp": {"pp": 2},
    "ep": {"dp_shard": 2, "ep": 2},
}
"""Axis -> sizes of a mesh of two ranks."""
RIGHT = "yes"
_TIMEOUT_S = 300.0
"""Of a kind over all axes, on a busy machine."""

_EVERY_OTHER = ["full_attention", "sliding_attention"]
_ROPE = {"rope_type": "default", "rope_theta": 10_000.0}
_INDEXER: Mapping[str, Any] = {
    "indexer_n_heads": 4,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 256,
    "indexer_budget": 16,
    "indexer_compress_ratio": 4,
}
VALUES: Mapping[str, Mapping[str, Any]] = {
    # values without a default in the class, which every checkpoint sets
    "cohere_compass_text": {"layer_types": _EVERY_OTHER * 20, "rope_parameters": dict.fromkeys(_EVERY_OTHER, _ROPE)},
    "deepseek_v2": {"num_experts_per_tok": 6},
    "dots1": {"n_routed_experts": 64, "n_shared_experts": 1, "num_experts_per_tok": 4},
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128},
    "ministral": {"head_dim": 128},
    "nemotron": {"num_key_value_heads": 8},
    # what checkpoints have and the class's defaults do not
    "bamba": {"attn_layer_indices": [9, 18, 27]},
    "falcon_h1": {"lm_head_multiplier": 0.5},
    "granite": {"logits_scaling": 8.0},
    "granitemoe": {"logits_scaling": 6.0},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 16, "logits_scaling": 6.0, "num_local_experts": 62},
    "hyperclovax": {"logits_scaling": 0.125},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 16},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 16},
    "phimoe": {"sliding_window": 131_072, "input_jitter_noise": 0.01},
    "qwen2": {"use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 2},
    "qwen2_moe": {"use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 2},
    "qwen4_exp": {"text_config": _INDEXER},
    "qwen4_exp_text": _INDEXER,
    "starcoder2": {"residual_dropout": 0.1, "embedding_dropout": 0.1},
}
"""Values of configurations that replace the defaults of transformers' classes."""
INTRO = """\
# Families of language models

<!-- Written by scripts/model_families.py, which tests each of them. -->

Every causal language model of transformers {version}, tested with few layers and small sizes: log-probabilities and
gradients of packed rollouts are compared with transformers' forward pass in eval mode, one sequence at a time. For
*packed* and *unpacked* they agree within {logprob:g} nats and {gradient:g} of the largest gradient.

- **packed**: sequences of any lengths are concatenated in one row, and the prompt of a group is computed once.
- **unpacked**: layers carry a state from token to token (recurrent, linear attention, convolutions). Each sequence has
  its own row, right-padded in a batch with sequences of similar length, and prompts are not shared; `tp` and `cp` are
  refused.
- **refused**: the run ends with an error before the first step.

The column *engine* shows whether `rollout.engine = "torch"` supports the model; vLLM has its own list of models.
At start-up each policy and each torch engine runs the same check on a small model of its own configuration
([decision 0014](decisions/0014-a-small-model-is-asked.md)). It therefore also covers families that are not listed here
and newer versions of transformers.

A checkpoint whose config.json has a `vision_config` is loaded as a vision-language model, also for text alone. It must
be of a family of [vision.md](vision.md); another one, such as a published Qwen 3.5, Gemma 4 or GOT-OCR 2, is refused at
start, and its row below is about a checkpoint of the text model alone.

## Engine and policy

With the first weights of a start each rollout replica generates 4 responses of up to 16 tokens to a fixed prompt of
random tokens. Before the first step trains, the policy computes their log-probabilities over the mesh that trains, and
logs the mean absolute difference (`start_mismatch` of [metrics](metrics.md)). Above 3e-4 nats a token in float32, and
0.1 if model or engine computes in another dtype, the console and `events.jsonl` have a warning; above 1 nat the run
ends. The prompt is 64 tokens longer than the window of the model's attention, or the length at which its rotary
embedding changes; it is as long as `model.max_length` allows where that is less, which the line then says, and has 512
tokens for a model without a window, or with one above 8,192. Prompts of the data may be shorter than that and agree,
until responses grow: vLLM's window of cohere2 is one token off from transformers'. A rollout replica that joins later
is compared if its first group is trained on with the weights that it was sampled with.

## Over ranks

Over ranks each run compares a small model, over its own mesh, with one process: log-probabilities and all gradients.
Where they differ, the run ends with an error before the first step. The columns of the axes have the results over two
ranks of each: *yes*, or the number of the reason for which the run is refused. Of the {trained} kinds that are trained:
"""


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of the check for one kind of model."""

    kind: str
    training: str
    """"packed", "unpacked", "refused", "not built", or "wrong"."""
    engine: bool = False
    note: str = ""
    over: Mapping[str, str] = field(default_factory=dict)
    """Axis -> `RIGHT`, or the reason of a refusal; without axes that were not tried."""

    @property
    def trained(self) -> bool:
        return self.training in ("packed", "unpacked")

    def row(self, reasons: Sequence[str] = ()) -> str:
        results = [self.over.get(axis, "?" if self.trained else "-") for axis in AXES]
        numbered = [str(reasons.index(result) + 1) if result in reasons else result for result in results]
        engine = "yes" if self.engine else "-"
        return " | ".join([f"| {self.kind}", self.training, engine, *numbered, f"{self.note} |"])


def try_kind(kind: str) -> Finding:
    """Compare log-probabilities and gradients of one training batch of a kind."""
    try:
        model, reference = (_make(kind) for _ in range(2))
    except Exception as error:  # of any family's own code
        return Finding(kind, "not built", note=_note(error))
    try:
        policy = CausalLMPolicy(model)
    except UserError as error:
        return Finding(kind, "refused", note=_note(error))
    off, slope = _differences(policy, model, reference)
    if not (off <= LOGPROB_TOLERANCE and slope <= GRADIENT_TOLERANCE):
        return Finding(kind, "wrong", note=f"{off:.1e} nats, gradients {slope:.1e}")
    training = "unpacked" if policy.module.unpacked else "packed"
    try:
        check_generation(reference)
    except UserError as error:
        return Finding(kind, training, note="" if policy.module.unpacked else _note(error))
    return Finding(kind, training, engine=True)


def _make(kind: str) -> PreTrainedModel:
    config: PreTrainedConfig = type(AutoConfig.for_model(kind))(**VALUES.get(kind, {}))
    found = cast(type[PreTrainedModel], MODEL_FOR_CAUSAL_LM_MAPPING[type(config)])
    if found.config_class is not type(config):  # as AutoModelForCausalLM does
        config = config.get_text_config()
    return miniature(found, config)


def _differences(policy: CausalLMPolicy, model: PreTrainedModel, reference: PreTrainedModel) -> tuple[float, float]:
    """Largest differences of a log-probability, and of a gradient relative to the largest one."""
    samples = _samples()
    batch = pack_batch(samples, microbatch_terms=10**6, share=Share(), metrics={})
    found = policy.forward(batch.microbatches[0]).logprobs
    reference.eval()
    with torch.enable_grad():
        wanted = torch.cat([plain_logprobs(reference, sample.prompt_tokens, sample.tokens) for sample in samples])
    expected, gradients = _gradients(reference, wanted), _gradients(model, found)
    largest = max(float(gradient.abs().max()) for gradient in expected.values())
    apart = [float((gradients.get(name, 0) - gradient).abs().max()) for name, gradient in expected.items()]
    return float((found - wanted).detach().abs().max()), max(apart) / largest


def _gradients(model: PreTrainedModel, logprobs: Tensor) -> dict[str, Tensor]:
    """Gradients by parameter, of a sum with a different weight for each term."""
    torch.sum(torch.linspace(-1, 1, len(logprobs)) * logprobs).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def _samples() -> list[TrainSequence]:
    """Two prompts with three responses each, of 4 to 25 tokens."""
    rng = np.random.default_rng(0)
    samples = []
    for _ in range(2):
        prompt = _tokens(rng, int(rng.integers(4, 10)))
        for _ in range(3):
            tokens = _tokens(rng, int(rng.integers(4, 26)))
            samples.append(
                TrainSequence(
                    prompt_tokens=prompt,
                    tokens=tokens,
                    logprobs=np.zeros(len(tokens), np.float32),
                    loss_mask=np.ones(len(tokens), bool),
                    advantage=1.0,
                )
            )
    return samples


def _tokens(rng: np.random.Generator, size: int) -> np.ndarray:
    return rng.integers(VOCABULARY // 3, VOCABULARY, size, dtype=np.int32)


def _note(error: Exception) -> str:
    """An error as a cell of the table, without facts of other columns and without measured numbers."""
    text = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    text = text.removeprefix("model.path: ").partition("; choose")[0].partition("; set rollout")[0]
    return re.sub(r"are [\d.e+-]+ nats from", "are not", text).replace("|", "\\|")[:200]


def try_ranks(kind: str, axes: Iterable[str]) -> dict[str, str]:
    """Compare a kind over two ranks of each axis with one; return what `over_ranks` does, or "error: ..."."""
    axes = list(axes)
    try:
        first, second = run_ranks(over_ranks, 2, timeout_s=_TIMEOUT_S, kind=kind, axes=axes)
    except RankFailed as error:
        if len(axes) > 1:
            return {axis: result for alone in axes for axis, result in try_ranks(kind, [alone]).items()}
        return {axes[0]: f"error: {error}"}
    return {axis: max(str(first[axis]), str(second[axis]), key=_is_wrong) for axis in axes}


def over_ranks(rank: int, world_size: int, *, kind: str, axes: Sequence[str]) -> dict[str, np.ndarray]:
    """By axis: `RIGHT`, the reason of a refusal, or "wrong: ...". Any other error ends the rank."""
    logging.disable(logging.WARNING)
    return {axis: np.asarray(_over_axis(kind, AXES[axis])) for axis in axes}


def _over_axis(kind: str, sizes: Mapping[str, int]) -> str:
    mesh = ReplicaMesh.build(ParallelDims(**sizes), device=torch.device("cpu"))
    model, setup = _make(kind), ModelSetup(mesh=mesh, parallel=ParallelSection.model_validate(sizes))
    try:
        check_ranks(model, setup)
    except UserError as error:
        return _reason(error, model)
    samples = [replace(sample, advantage=weight) for sample, weight in zip(_samples(), np.linspace(-1, 1, 6))]
    off, slope, parameter = compare_ranks(model, setup, samples=samples)
    if off <= TOLERANCE and slope <= RANKS_GRADIENT_TOLERANCE:
        return RIGHT
    return f"wrong: {off:.1e} nats, gradients {slope:.1e} ({parameter})"


def _is_wrong(result: str) -> bool:
    return result.startswith(("wrong: ", "error: "))


def _reason(error: UserError, model: PreTrainedModel) -> str:
    """A refusal over ranks without the family's name, the advice and measured numbers."""
    text = " ".join(str(error).split()).removeprefix("[policy.parallel] ").rpartition("; ")[0]
    text = re.sub(r"^(tp|pp|cp|ep)( = 2)?: ", "", text).replace(type(model).__name__, "the model")
    return re.sub(r"( differs from one process| for all parts of the model)\W.*", r"\1", text)


def sweep(kinds: Sequence[str], axes: Sequence[str], *, check: bool) -> int:
    """Try kinds of the page over ranks and write what comes out, or compare it with the page."""
    preload("cosmos_rl_llm.policy.rank_probe", "cosmos_rl_llm.policy.pipelined", "cosmos_rl_llm.engines.torch.engine")
    findings, status = {each.kind: each for each in parse(PAGE.read_text(encoding="utf-8"))}, 0
    for kind in kinds or [each.kind for each in findings.values() if each.trained]:
        known = findings[kind].over
        results = try_ranks(kind, [axis for axis in axes if kinds or check or axis not in known])
        for axis, result in results.items():
            other = check and result != known.get(axis)
            print(kind, axis, result, *(["but the page:", known.get(axis)] if other else []), flush=True)
            status |= other or _is_wrong(result)
        if results and not check:
            sound = {axis: result for axis, result in results.items() if not _is_wrong(result)}
            findings[kind] = replace(findings[kind], over={**known, **sound})
            PAGE.write_text(render(list(findings.values())), encoding="utf-8")
    return status


def render(findings: Sequence[Finding]) -> str:
    """Return the page."""
    trained = [each for each in findings if each.trained]
    intro = INTRO.format(
        version=transformers.__version__,
        logprob=LOGPROB_TOLERANCE,
        gradient=GRADIENT_TOLERANCE,
        trained=len(trained),
    )
    reasons = sorted({result for each in trained for result in each.over.values() if result != RIGHT})
    axes = ["| axis | right | refused | not tried |", "|---|---|---|---|"]
    for axis in AXES:
        results = [each.over[axis] for each in trained if axis in each.over]
        right = results.count(RIGHT)
        axes.append(f"| {axis} | {right} | {len(results) - right} | {len(trained) - len(results)} |")
    numbered = [f"{number}. {reason}" for number, reason in enumerate(reasons, 1)]
    order = ("packed", "unpacked", "refused", "not built")
    counts = ", ".join(f"{sum(each.training == name for each in findings)} {name}" for name in order)
    built = sorted(findings, key=lambda each: (order.index(each.training), each.kind))
    columns = ["model_type", "training", "engine", *AXES, "reason"]
    table = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|", *(each.row(reasons) for each in built)]
    lines = [intro, *axes, "", "Reasons over two ranks:", "", *numbered, ""]
    return "\n".join([*lines, f"{len(findings)} kinds: {counts}.\n", *table]) + "\n"


def parse(page: str) -> list[Finding]:
    """Return what `render` made a page of, without results over ranks if it is of another version of transformers."""
    reasons = re.findall(r"^\d+\. (.*)$", page, flags=re.MULTILINE)
    current = f"transformers {transformers.__version__}, tested" in page
    findings = []
    for line in page.partition("\n| model_type | ")[2].splitlines()[2:]:
        kind, training, engine, *results, note = line[2:-2].split(" | ")
        over = {
            axis: reasons[int(result) - 1] if result.isdigit() else result
            for axis, result in zip(AXES, results, strict=True)
            if current and result not in ("?", "-")
        }
        findings.append(Finding(kind, training, engine == "yes", note, over))
    return findings


def main(arguments: Sequence[str]) -> int:
    """Test kinds; return the exit status."""
    logging.disable(logging.WARNING)
    parser = argparse.ArgumentParser(description="Try the language models of transformers in a small size.")
    parser.add_argument("kinds", nargs="*", metavar="KIND", help="model_type; without one, all")
    parser.add_argument("--over", action="append", choices=list(AXES), help="compare two ranks of an axis with one")
    parser.add_argument("--check", action="store_true", help="compare with the page, instead of writing it")
    options = parser.parse_args(arguments)
    if options.over:
        return sweep(options.kinds, options.over, check=options.check)
    findings = [try_kind(kind) for kind in options.kinds or sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)]
    wrong = [each.row() for each in findings if each.training == "wrong"]
    if options.kinds or wrong:
        print("\n".join(wrong or [each.row() for each in findings]))
        return 1 if wrong else 0
    before = PAGE.read_text(encoding="utf-8")
    over = {each.kind: each.over for each in parse(before)}
    page = render([replace(each, over=over.get(each.kind, {}) if each.trained else {}) for each in findings])
    if not options.check:
        PAGE.write_text(page, encoding="utf-8")
        return 0
    if before == page:
        return 0
    print(f"{PAGE} is out of date: run scripts/model_families.py")
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

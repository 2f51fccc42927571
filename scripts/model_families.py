"""Write docs/families.md: transformers' causal language models that can be trained, each tested in a small size.

.venv/bin/python scripts/model_families.py            # write the page
.venv/bin/python scripts/model_families.py --check    # exit 1 if it is out of date
.venv/bin/python scripts/model_families.py qwen3 ...  # test some kinds and print the results

For each kind: log-probabilities and gradients of packed rollouts with shared prompts, by `CausalLMPolicy`, against
transformers' own forward pass in eval mode, one sequence at a time. A kind must match, or be refused with a
UserError; otherwise the script ends with an error.
"""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import transformers
from torch import Tensor
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from cosmos_rl_core.errors import UserError
from cosmos_rl_core.types import Share
from cosmos_rl_llm.data.collate import Sample, pack_batch
from cosmos_rl_llm.engines.torch.engine import check_generation
from cosmos_rl_llm.model.miniature import VOCABULARY, miniature
from cosmos_rl_llm.policy.policy import CausalLMPolicy
from cosmos_rl_llm.policy.probe import plain_logprobs

PAGE = Path(__file__).parents[1] / "docs" / "families.md"
LOGPROB_TOLERANCE = 2e-5
"""In nats."""
GRADIENT_TOLERANCE = 1e-4
"""Relative to the largest gradient of the model."""

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

Over ranks each run compares a small model, over its own mesh, with one process: log-probabilities and all gradients.
Where they differ, the run ends with an error before the first step. Over two processes of one axis, of the 120 kinds
that are trained:

| axis | right | refused | not tried |
|---|---|---|---|
| dp_shard | 114 | 2 | 4 |
| tp | 54 | 65 | 1 |
| cp | 89 | 31 | 0 |
| pp | 71 | 49 | 0 |
| ep | 39 | 81 | 0 |

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

## All kinds
"""


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of the check for one kind of model."""

    kind: str
    training: str
    """"packed", "unpacked", "refused", "not built", or "wrong"."""
    engine: bool = False
    note: str = ""

    @property
    def row(self) -> str:
        return f"| {self.kind} | {self.training} | {'yes' if self.engine else '-'} | {self.note} |"


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


def _samples() -> list[Sample]:
    """Two prompts with three responses each, of 4 to 25 tokens."""
    rng = np.random.default_rng(0)
    samples = []
    for _ in range(2):
        prompt = _tokens(rng, int(rng.integers(4, 10)))
        for _ in range(3):
            tokens = _tokens(rng, int(rng.integers(4, 26)))
            samples.append(
                Sample(
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


def render(findings: Sequence[Finding]) -> str:
    """Return the page."""
    intro = INTRO.format(version=transformers.__version__, logprob=LOGPROB_TOLERANCE, gradient=GRADIENT_TOLERANCE)
    order = ("packed", "unpacked", "refused", "not built")
    counts = ", ".join(f"{sum(each.training == name for each in findings)} {name}" for name in order)
    built = sorted(findings, key=lambda each: (order.index(each.training), each.kind))
    table = ["| model_type | training | engine | reason |", "|---|---|---|---|", *(each.row for each in built)]
    return "\n".join([intro, f"{len(findings)} kinds: {counts}.\n", *table]) + "\n"


def main(arguments: Sequence[str]) -> int:
    """Test kinds; return the exit status."""
    logging.disable(logging.WARNING)
    check = "--check" in arguments
    named = [argument for argument in arguments if argument != "--check"]
    findings = [try_kind(kind) for kind in named or sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)]
    wrong = [each.row for each in findings if each.training == "wrong"]
    if named or wrong:
        print("\n".join(wrong or [each.row for each in findings]))
        return 1 if wrong else 0
    page = render(findings)
    if not check:
        PAGE.write_text(page, encoding="utf-8")
        return 0
    if PAGE.read_text(encoding="utf-8") == page:
        return 0
    print(f"{PAGE} is out of date: run scripts/model_families.py")
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

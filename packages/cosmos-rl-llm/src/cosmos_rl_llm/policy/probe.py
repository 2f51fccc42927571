"""Check that this package computes the same as transformers: on a small model of the family, before the first step.

    miniature of the policy's model
      transformers, untouched, eval     each sequence alone             -> wanted
      TermModel, packed                 both in one row, prompt shared  -> equal: the family runs packed
      TermModel, unpacked               one sequence per row            -> equal: it carries a state, and runs unpacked
                                                                           else UserError

The check compares outputs, not names of families, and so covers additions and changes of newer transformers versions.
docs/decisions/0014 explains the use of a miniature instead of the policy's own weights; docs/families.md has the
results for all families of transformers.
"""

from __future__ import annotations

import json
from functools import lru_cache
from typing import cast

import numpy as np
import torch
from torch import Tensor
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedModel

from cosmos_rl_core.errors import UserError
from cosmos_rl_core.parallel.device import exact_products
from cosmos_rl_core.parallel.mesh import ReplicaMesh
from cosmos_rl_core.types import Share
from cosmos_rl_llm.data.collate import TrainSequence, pack_batch
from cosmos_rl_llm.model.causal_lm import score_layer
from cosmos_rl_llm.model.miniature import VOCABULARY, miniature, shrink
from cosmos_rl_llm.policy.token_model import TermModel, TermOptions

TOLERANCE = 1e-3
"""Maximum difference of a log-probability in float32, in nats. Rounding gives about 1e-6, a leak 0.1 and more."""

_SPARSE = "its sparse attention chooses tokens by a mask, which packed rows do not have"

_PROMPT, _RESPONSES = 7, (9, 13)
"""Numbers of tokens: above the windows and chunks of a miniature, on both sides of the original length of longrope."""


def runs_unpacked(
    model: PreTrainedModel, *, compute_dtype: torch.dtype | None = None, mesh: ReplicaMesh | None = None
) -> bool:
    """Return whether the family of `model` must run one sequence per row; False if packing is correct.

    Sends nothing and does not use `model`'s weights, which need not be loaded. Results are cached for the process.

    Raises:
        UserError: log-probabilities differ from those of transformers both ways, or there are none; or the family runs
            unpacked and the mesh has an axis (tp, cp) that splits layers or sequences.
    """
    kind, config = describe(model)
    unpacked = _verdict(kind, config, str(model.device if mesh is None else mesh.device))
    weights = model.dtype if mesh is None or compute_dtype is None else compute_dtype
    _check_type(kind, config, weights, None if mesh else compute_dtype, unpacked)
    cut = [axis for axis in ("tp", "cp") if mesh is not None and mesh.axis(axis) is not None]
    if unpacked and cut:
        raise UserError(
            f"[policy.parallel] {cut[0]}: layers of {kind.__name__} carry a state from token to token, which cannot be "
            f"cut; set {cut[0]} = 1 and dp_shard higher"
        )
    return unpacked


def describe(model: PreTrainedModel) -> tuple[type[PreTrainedModel], str]:
    """Return the arguments of `family_miniature`: class, and small configuration as JSON."""
    kind = type(model)
    if score_layer(model) is not None:  # the decoder is checked, by the language model that has it
        kind = cast(type[PreTrainedModel], MODEL_FOR_CAUSAL_LM_MAPPING[type(model.config)])
    return kind, json.dumps(shrink(model.config.to_dict()), sort_keys=True, default=str)


@torch.no_grad()
def compare(model: PreTrainedModel) -> tuple[float, float]:
    """Take over `model`; return the errors of packed and unpacked log-probabilities against transformers', in nats.

    Raises UserError for a model that does not run, by itself or packed.
    """
    name, samples = type(model).__name__, probe_samples()
    try:
        expected = torch.cat([plain_logprobs(model, sample.prompt_tokens, sample.tokens) for sample in samples])
    except Exception as error:  # any, from the family's own code
        raise UserError(
            f"model.path: {name} cannot be checked, since a small model of its configuration does not run "
            f"({first_line(error)}); choose another model"
        ) from error
    try:
        terms = TermModel(model)
        packed, unpacked = (_logprobs(terms, samples, unpacked=unpacked) for unpacked in (False, True))
    except UserError:
        raise
    except Exception as error:
        why = _SPARSE if _is_sparse(model) else first_line(error)
        raise UserError(f"model.path: {name} cannot run on packed sequences ({why}); choose another model") from error
    return _difference(packed, expected), _difference(unpacked, expected)


def plain_logprobs(model: PreTrainedModel, prompt: np.ndarray, tokens: np.ndarray) -> Tensor:
    """Log-probabilities [T] of `tokens` [T] after `prompt` by transformers' own forward pass, in a batch of one."""
    row = torch.from_numpy(np.concatenate([prompt, tokens])).long().to(model.device)
    logits = model(input_ids=row[None, :-1], use_cache=False).logits[0, len(prompt) - 1 :].float()
    return torch.log_softmax(logits, dim=-1).gather(1, row[len(prompt) :, None])[:, 0]


def probe_samples() -> list[TrainSequence]:
    """Two sequences of random tokens with one prompt."""
    rng = np.random.default_rng(0)
    prompt = rng.integers(VOCABULARY // 3, VOCABULARY, _PROMPT, dtype=np.int32)  # greater than all special tokens
    return [_sample(prompt, rng.integers(VOCABULARY // 3, VOCABULARY, size, dtype=np.int32)) for size in _RESPONSES]


def family_miniature(kind: type[PreTrainedModel], config: str, *, device: str = "cpu") -> PreTrainedModel:
    """`miniature` of a configuration as JSON, in eval mode. Raises UserError if none can be made."""
    try:
        assert kind.config_class is not None, f"{kind} is not a concrete model"
        model = miniature(kind, kind.config_class.from_dict(json.loads(config))).eval()
        return model.to(device)  # pyright: ignore[reportArgumentType] transformers wraps it without `self`
    except Exception as error:  # any, from the family's own code
        raise UserError(
            f"model.path: {kind.__name__} cannot be checked, since no small model can be made of its configuration "
            f"({first_line(error)}); choose another model"
        ) from error


@lru_cache(maxsize=64)
def _verdict(kind: type[PreTrainedModel], config: str, device: str) -> bool:
    with exact_products():
        packed, unpacked = compare(family_miniature(kind, config, device=device))
    if packed <= TOLERANCE:
        return False
    if unpacked <= TOLERANCE:
        return True
    raise UserError(
        f"model.path: log-probabilities of {kind.__name__} are {unpacked:.2g} nats from transformers' own, also "
        f"of a sequence alone: {_why(family_miniature(kind, config, device=device))}; choose another model"
    )


@lru_cache(maxsize=64)
def _check_type(
    kind: type[PreTrainedModel], config: str, weights: torch.dtype, compute: torch.dtype | None, unpacked: bool
) -> None:
    """Raise UserError if the family does not run in a dtype. Values are compared only in float32 (see 0014)."""
    if weights == torch.float32 and compute is None:
        return
    model = family_miniature(kind, config)
    model.to(weights)  # pyright: ignore[reportArgumentType]
    try:
        with torch.no_grad():
            terms = TermModel(model, TermOptions(compute_dtype=compute))
            logprobs = _logprobs(terms, probe_samples(), unpacked=unpacked)
    except Exception as error:  # any, from the family's own code
        logprobs, why = None, first_line(error)
    else:
        why = "values that are not finite"
    if logprobs is None or not logprobs.isfinite().all():
        name = str(compute or weights).removeprefix("torch.")
        raise UserError(f'model.dtype: {kind.__name__} does not run in {name} ({why}); set model.dtype = "float32"')


def _logprobs(terms: TermModel, samples: list[TrainSequence], *, unpacked: bool) -> Tensor:
    terms.unpacked = unpacked
    batch = pack_batch(samples, microbatch_terms=10**6, share=Share(), metrics={})
    return terms(None, terms.row(batch.microbatches[0].inputs))[0]


def _sample(prompt: np.ndarray, tokens: np.ndarray) -> TrainSequence:
    return TrainSequence(
        prompt_tokens=prompt,
        tokens=tokens,
        logprobs=np.zeros(len(tokens), np.float32),
        loss_mask=np.ones(len(tokens), bool),
        advantage=0.0,
    )


def _difference(left: Tensor, right: Tensor) -> float:
    difference = float((left - right).abs().max())
    return difference if difference == difference else float("inf")


@torch.no_grad()
def _why(model: PreTrainedModel) -> str:
    if _is_sparse(model):
        return _SPARSE
    prompt, tokens = probe_samples()[1].prompt_tokens, probe_samples()[1].tokens
    complete, beginning = plain_logprobs(model, prompt, tokens), plain_logprobs(model, prompt, tokens[:-3])
    if _difference(complete[:-3], beginning) > TOLERANCE:
        return "its tokens attend to later ones"
    return "its attention, or its code after the decoder, does something that is not supported"


def _is_sparse(model: PreTrainedModel) -> bool:
    config = model.config.get_text_config()
    return any(getattr(config, key, None) for key in ("index_topk", "indexer_budget"))


def first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__

"""The frozen model of [teacher] in the ranks of the policy.

                     Microbatch -> teacher's decoder -> hidden [T, H]
    "advantage"      -> teacher's head -> log-probability of each label [T]
    top_k            -> teacher's head -> top k tokens with log-probabilities [T, k + 1]
    whole vocabulary -> hidden [T, H], kept until the policy's pass, which has both heads for each chunk of terms

Its decoder is sharded as the policy's: over cp each rank has the hidden states of its own terms, and outputs are
gathered; of a pipeline the last stage has outputs. Its output head is whole on each rank, over tp the rows of the
rank's tokens, as the policy's pass reads it while other parts of the teacher are sharded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from cosmos_rl_core.algorithms.config import TeacherSection
from cosmos_rl_core.errors import UserError
from cosmos_rl_core.interfaces import Policy
from cosmos_rl_core.parallel.dtensor import whole
from cosmos_rl_core.parallel.offload.swap import tensors_of
from cosmos_rl_core.types import Microbatch
from cosmos_rl_llm.config import LLMModelConfig
from cosmos_rl_llm.media.item import VisionFamily
from cosmos_rl_llm.model.output_head import OutputHead, Vocabulary, scaled_logits
from cosmos_rl_llm.policy.context import TokenShard
from cosmos_rl_llm.policy.logprobs import parts
from cosmos_rl_llm.policy.pipelined import PipelinedPolicy
from cosmos_rl_llm.policy.policy import CausalLMPolicy
from cosmos_rl_llm.policy.token_model import TermModel
from cosmos_rl_llm.teacher.check import as_model, check_length, check_sight, check_tokens, of_teacher
from cosmos_rl_llm.teacher.divergence import Classes, Top, Whole, term_divergence

Build = Callable[[LLMModelConfig], Policy]
Model = CausalLMPolicy | PipelinedPolicy

_BUFFERS = 3
"""Vocabulary-sized tensors that `LLMTeacher.forward` has at a time."""


class LLMTeacher:
    """Implements `cosmos_rl_core.interfaces.Teacher`, and computes the policy's divergences."""

    def __init__(self, teacher: Model, policy: Model, config: TeacherSection) -> None:
        """Take over `teacher`, which has the tokens of `policy`; with loss = "divergence", `policy` reports them.

        Both are of the same ranks. Raises UserError for a `top_k` that is not below the number of tokens.
        """
        self.module = teacher.module
        self._teacher = teacher
        self._config = config
        self._last = teacher.last_stage
        self._policy = policy.last_stage
        self._own_head: OutputHead | None = None
        num_tokens = min(_num_tokens(teacher), _num_tokens(policy))
        if config.top_k >= num_tokens:
            raise UserError(f"[teacher] top_k = {config.top_k}: the models have {num_tokens} tokens; lower it")
        if self._last is None or self._policy is None:  # a stage without heads
            return
        self._vocabulary = _vocabulary(self._policy, _num_tokens(policy)).within(num_tokens)
        if self._vocabulary.start == self._vocabulary.stop:
            raise UserError(
                f"[policy.parallel] tp: too many ranks for the {num_tokens} tokens of both models; lower it"
            )
        self._last.returns_hidden = True
        if config.loss == "divergence":
            self._policy.compare = self.compare

    def tensors(self) -> Iterator[Tensor]:
        """Parameters and buffers, and the output head, where the decoder is sharded."""
        yield from tensors_of(self.module)
        if self._own_head is not None:
            yield from (tensor for tensor in (self._own_head.weight, self._own_head.bias) if tensor is not None)

    @torch.no_grad()
    def forward(self, microbatch: Microbatch) -> Mapping[str, Tensor]:
        """Return `logprobs` and `agreement` [T], or `ids` [T, k] and `logprobs` [T, k + 1], or `hidden` [T, H].

        `agreement`: 1.0 where the label is the most likely token, else 0.0. The teacher routes tokens by itself. Empty
        on the ranks before the last stage of a pipeline.
        """
        inputs = {name: tensor for name, tensor in microbatch.inputs.items() if name != "routes"}
        states = self._teacher.term_states(replace(microbatch, inputs=inputs))
        if states is None:
            return {}
        assert self._last is not None
        (row, hidden), config = states, self._config
        self.head()  # gathered by all ranks together, before the policy's pass
        if config.loss == "divergence" and not config.top_k:
            outputs = {"hidden": hidden}
        else:
            chunk = max(1, self._last.logits_bytes // (_BUFFERS * 4 * self._vocabulary.widest))
            chunks = parts(len(hidden), chunk) or [slice(0)]  # over cp a rank may have no term
            read = [self._read(hidden[part], row.labels[part]) for part in chunks]
            outputs = {name: torch.cat([each[name] for each in read]) for name in read[0]}
        own = row.own_terms
        return outputs if own is None else {name: own.gather(each) for name, each in outputs.items()}

    def _read(self, hidden: Tensor, labels: Tensor) -> dict[str, Tensor]:
        assert self._last is not None
        vocabulary = self._vocabulary
        logprobs = vocabulary.log_softmax(scaled_logits(self.head(), hidden, self._last.temperature))
        if self._config.loss == "advantage":
            of_labels = vocabulary.gather(logprobs, labels[:, None]).squeeze(1)
            return {"logprobs": of_labels, "agreement": (vocabulary.argmax(logprobs) == labels).float()}
        top, ids = vocabulary.topk(logprobs, self._config.top_k)
        rest = vocabulary.logsumexp(vocabulary.put(logprobs, ids, -torch.inf))
        return {"ids": ids, "logprobs": torch.cat([top, rest], dim=1)}

    def compare(self, hidden: Tensor, head: OutputHead, row: TokenShard) -> Mapping[str, Tensor]:
        """Return `teacher` [t] with gradient, the divergence, and the metrics `teacher_kl` and `teacher_agreement`.

        hidden [t, H'] and head: the policy's. row: with the results of `forward` for these terms.
        """
        module = self._policy
        assert module is not None
        values, reverse, agreement = term_divergence(
            hidden,
            head,
            self._classes(row.teacher, temperature=module.temperature),
            beta=self._config.beta,
            temperature=module.temperature,
            logits_bytes=module.logits_bytes,
        )
        return {"teacher": values, "teacher_kl": reverse, "teacher_agreement": agreement}

    def _classes(self, outputs: Mapping[str, Tensor], *, temperature: float) -> Classes:
        if self._config.top_k:
            return Top(outputs["ids"], outputs["logprobs"], self._vocabulary)
        return Whole(outputs["hidden"], self.head(), temperature, self._vocabulary)

    @torch.no_grad()
    def head(self) -> OutputHead:
        """The output head over this rank's tokens of both models. Over ranks all call it together at first."""
        module = self._last
        assert module is not None
        if module.mesh is None:
            return self._vocabulary.rows(module.head()).cast(module.autocast)
        if self._own_head is None:
            head, device = OutputHead.of(module.causal_lm), module.device
            bias = None if head.bias is None else whole(head.bias.to(device))
            everything = replace(head, weight=whole(head.weight.to(device)), bias=bias).without(module.banned)
            own = self._vocabulary.rows(everything)
            self._own_head = replace(own, weight=own.weight.clone() if module.axis is not None else own.weight)
        return self._own_head


def _num_tokens(model: Model) -> int:
    """Rows of the output head; a stage without it knows them too."""
    config = model.module.config
    return config.get_text_config().vocab_size


def _vocabulary(module: TermModel, num_tokens: int) -> Vocabulary:
    """The tokens whose logits this rank computes."""
    return Vocabulary.all(num_tokens) if module.axis is None else Vocabulary.part(num_tokens, module.axis)


def build_teacher(section: TeacherSection, *, model: LLMModelConfig, build: Build, policy: Model) -> LLMTeacher:
    """Load the teacher of `policy`. All ranks of a replica call this together.

    build: returns the policy of a [model] section. Raises UserError for a teacher with another tokenizer, or other
    processing of pictures, than the policy.
    """
    with of_teacher():
        teacher = build(as_model(section, model))
    assert isinstance(teacher, Model)
    theirs, own = teacher.chat, policy.chat
    assert theirs is not None and own is not None
    sees, taught = theirs.vision, own.vision
    check_sight(sees is not None, taught is not None, path=section.path)
    check_tokens(own.tokenizer.get_vocab(), theirs.tokenizer.get_vocab(), path=section.path)
    check_length(own.max_length, theirs.max_length, path=section.path)
    if sees is not None and taught is not None:
        check_processing(taught.family, sees.family, path=section.path)
    return LLMTeacher(teacher, policy, section)


def check_processing(family: VisionFamily, teacher: VisionFamily, *, path: str) -> None:
    """Raise UserError with the first difference in how model and teacher make patches and placeholders of pictures."""
    own, theirs = _processing(family), _processing(teacher)
    for name in sorted(own.keys() | theirs.keys()):
        if own.get(name) != theirs.get(name):
            raise UserError(
                f"[teacher] path = {path!r} processes pictures in another way than the model: {name} is "
                f"{theirs.get(name)} in the teacher's files and {own.get(name)} in the model's; choose a teacher "
                "of the same family"
            )


def _processing(family: VisionFamily) -> dict[str, Any]:
    """Values in effect, by name: those of the files and the defaults of what they leave out."""
    values = {field.name: getattr(family, field.name) for field in fields(cast(Any, family))}
    del values["files"]
    processor = values.pop("image_processor").to_dict()
    values |= {name: value for name, value in processor.items() if not name.endswith(("_type", "_class"))}
    for name, part in [(name, value) for name, value in values.items() if is_dataclass(value)]:
        del values[name]
        values |= {f"{name}.{field.name}": getattr(part, field.name) for field in fields(part)}
    plain = {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in values.items()}
    return {"family": type(family).__name__, **plain}

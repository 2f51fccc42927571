"""The frozen model of [teacher] in the ranks of the policy.

                     Microbatch -> teacher's decoder -> hidden [T, H]
    "advantage"      -> teacher's head -> log-probability of each label [T]
    top_k            -> teacher's head -> top k tokens with log-probabilities [T, k + 1]
    whole vocabulary -> hidden [T, H], kept until the policy's pass, which has both heads for each chunk of terms

Its decoder is sharded as the policy's. Over ranks its output head is whole on each, as the policy's pass reads it while
other parts of the teacher are sharded.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from cosmos_rl_core.algorithms.config import TeacherSection
from cosmos_rl_core.errors import UserError
from cosmos_rl_core.interfaces import Policy
from cosmos_rl_core.parallel.axes.fsdp import reshard
from cosmos_rl_core.parallel.dtensor import whole
from cosmos_rl_core.parallel.memory.swap import tensors_of
from cosmos_rl_core.types import Microbatch
from cosmos_rl_llm.config import LLMModelConfig
from cosmos_rl_llm.media.item import VisionFamily
from cosmos_rl_llm.model.causal_lm import Head
from cosmos_rl_llm.policy.logprobs import parts, scaled_logits
from cosmos_rl_llm.policy.policy import CausalLMPolicy, TextPolicy
from cosmos_rl_llm.policy.token_model import Row, TermModel
from cosmos_rl_llm.teacher.check import as_model, check_sight, check_tokens, of_teacher
from cosmos_rl_llm.teacher.divergence import Classes, Top, Whole, term_divergence

Build = Callable[[LLMModelConfig], Policy]

_BUFFERS = 3
"""Vocabulary-sized tensors that `Teacher.forward` has at a time."""


class Teacher:
    """Implements `cosmos_rl_core.interfaces.Teacher`, and computes the policy's divergences."""

    def __init__(self, teacher: CausalLMPolicy, policy: CausalLMPolicy, config: TeacherSection) -> None:
        """Take over `teacher`, which has the tokens of `policy`; with loss = "divergence", `policy` reports them.

        Raises UserError for a `top_k` that is not below the number of tokens.
        """
        self.module = teacher.module
        self._config = config
        self._policy = policy.module
        self._own_head: Head | None = None
        self._num_tokens = min(_num_tokens(self.module), _num_tokens(policy.module))
        if config.top_k >= self._num_tokens:
            raise UserError(f"[teacher] top_k = {config.top_k}: the models have {self._num_tokens} tokens; lower it")
        self.module.returns_hidden = True
        if config.loss == "divergence":
            policy.module.compare = self.compare

    def tensors(self) -> Iterator[Tensor]:
        """Parameters and buffers, and the whole output head, where the decoder is sharded."""
        yield from tensors_of(self.module)
        if self._own_head is not None:
            yield from (tensor for tensor in (self._own_head.weight, self._own_head.bias) if tensor is not None)

    @torch.no_grad()
    def forward(self, microbatch: Microbatch) -> Mapping[str, Tensor]:
        """Return `logprobs` and `agreement` [T], or `ids` [T, k] and `logprobs` [T, k + 1], or `hidden` [T, H].

        `agreement`: 1.0 where the label is the most likely token, else 0.0. The teacher routes tokens by itself.
        """
        inputs = {name: tensor for name, tensor in microbatch.inputs.items() if name != "routes"}
        row = self.module.row(inputs)
        hidden = self.module(None, row)
        reshard(self.module)
        config = self._config
        if config.loss == "divergence" and not config.top_k:
            return {"hidden": hidden}
        chunk = max(1, self.module.logits_bytes // (_BUFFERS * 4 * self._num_tokens))
        read = [self._read(hidden[part], row.labels[part]) for part in parts(len(hidden), chunk)]
        return {name: torch.cat([each[name] for each in read]) for name in read[0]}

    def _read(self, hidden: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logprobs = scaled_logits(self.head(), hidden, self.module.temperature).log_softmax(-1)
        if self._config.loss == "advantage":
            of_labels = logprobs.gather(1, labels[:, None]).squeeze(1)
            return {"logprobs": of_labels, "agreement": (logprobs.argmax(-1) == labels).float()}
        top = logprobs.topk(self._config.top_k, dim=-1)
        rest = logprobs.scatter_(1, top.indices, -torch.inf).logsumexp(-1, keepdim=True)
        return {"ids": top.indices, "logprobs": torch.cat([top.values, rest], dim=1)}

    def compare(self, hidden: Tensor, head: Head, row: Row) -> Mapping[str, Tensor]:
        """Return `teacher` [T] with gradient, the divergence, and the metrics `teacher_kl` and `teacher_agreement`.

        hidden [T, H'] and head: the policy's. row: with the results of `forward`.
        """
        module = self._policy
        values, reverse, agreement = term_divergence(
            hidden,
            head,
            self._classes(row.teacher),
            beta=self._config.beta,
            temperature=module.temperature,
            logits_bytes=module.logits_bytes,
        )
        return {"teacher": values, "teacher_kl": reverse, "teacher_agreement": agreement}

    def _classes(self, outputs: Mapping[str, Tensor]) -> Classes:
        if self._config.top_k:
            return Top(outputs["ids"], outputs["logprobs"], self._num_tokens)
        return Whole(outputs["hidden"], self.head(), self.module.temperature)

    @torch.no_grad()
    def head(self) -> Head:
        """The whole output head over the tokens of both models. Over ranks all of them call it together at first."""
        if self.module.mesh is None:
            return self._cut(self.module.head()).cast(self.module.autocast)
        if self._own_head is None:
            head, device = self.module.head(), self.module.device
            bias = None if head.bias is None else whole(head.bias.to(device))
            self._own_head = self._cut(replace(head, weight=whole(head.weight.to(device)), bias=bias))
        return self._own_head

    def _cut(self, head: Head) -> Head:
        size = self._num_tokens
        return replace(head, weight=head.weight[:size], bias=None if head.bias is None else head.bias[:size])


def _num_tokens(module: TermModel) -> int:
    return len(module.head().weight)


def build_teacher(section: TeacherSection, *, model: LLMModelConfig, build: Build, policy: CausalLMPolicy) -> Teacher:
    """Load the teacher of `policy`. All ranks of a replica call this together.

    build: returns the policy of a [model] section. Raises UserError for a teacher with another tokenizer, or other
    processing of pictures, than the policy.
    """
    with of_teacher():
        teacher = build(as_model(section, model))
    assert isinstance(teacher, TextPolicy) and isinstance(policy, TextPolicy), "a pipeline has no teachers"
    sees, taught = teacher.module.vision, policy.module.vision
    check_sight(sees is not None, taught is not None, path=section.path)
    check_tokens(policy.chat.tokenizer.get_vocab(), teacher.chat.tokenizer.get_vocab(), path=section.path)
    if sees is not None and taught is not None and _processing(sees) != _processing(taught):
        raise UserError(
            f"[teacher] path = {section.path!r} processes pictures in another way than the model: compare their "
            f"{', '.join(sees.files)}"
        )
    return Teacher(teacher, policy, section)


def _processing(family: VisionFamily) -> tuple[object, ...]:
    """All that decides how a picture becomes patches and placeholders."""
    files = {name: json.loads(text) for name, text in family.files.items()}
    return type(family), dict(family.token_ids), files

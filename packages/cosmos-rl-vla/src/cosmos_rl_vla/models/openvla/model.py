"""OpenVLA (arXiv:2406.09246) and OpenVLA-OFT with discrete actions (arXiv:2502.19645).

                 S tokens                                              H D tokens
    openvla      <s> | images | state | In: What action ... Out:       a1 a2 ...         causal
    openvla_oft  <s> | images | state | In: What action ... Out:       0  0  ... 0 </s>  bidirectional

An action token is sampled from the output one position before it: the first from the prompt's last token, which the
critic reads too. OFT's L1 regression head has no likelihood, and is not implemented.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import torch
from pydantic import BaseModel
from torch import Tensor, nn
from torch.nn import functional as F

from cosmos_rl_core.parallel.device import to_device
from cosmos_rl_core.rollout.kv_cache import cache_argument
from cosmos_rl_vla.actions import ActionStats
from cosmos_rl_vla.models.base import (
    Acted,
    ActionModel,
    Inputs,
    Randomness,
    Replay,
    ScoredActions,
    SupervisedLosses,
    masked_mean,
)
from cosmos_rl_vla.models.openvla.checkpoint import HINT, OpenVLANames
from cosmos_rl_vla.models.openvla.config import OURS, OpenVLAConfig
from cosmos_rl_vla.models.openvla.prismatic import Projector, ProprioProjector, VisionBackbone
from cosmos_rl_vla.models.openvla.stats import to_published
from cosmos_rl_vla.models.value import Readout

END = 2
"""Llama's </s>, at the end of every chunk in training."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """An observation as S input tokens of the language model."""

    embedded: Tensor
    """[B, S, width]."""
    mask: Tensor
    """bool [B, S]: False for padding."""
    last: Tensor
    """int64 [B]: index of the prompt's last token."""


class OpenVLAModel(ActionModel):
    """Parameters have the public checkpoints' names; the critic's prefix is "value_head."."""

    hint = HINT

    def __init__(self, config: OpenVLAConfig) -> None:
        super().__init__()
        from transformers import LlamaConfig, LlamaForCausalLM

        config.check()
        self.config = config
        self.horizon = self.model_horizon = config.horizon
        self.action_dim, self.value_dim = config.action_dim, config.value_dim
        self.names = OpenVLANames(config.towers)
        self.bins = ActionBins(first=config.first_token, count=config.bins)
        self.vision_backbone = VisionBackbone(config)
        self.language_model = LlamaForCausalLM(LlamaConfig(**config.language))
        width = self.language_model.config.hidden_size
        self.projector = Projector(self.vision_backbone.width, width)
        self.proprio_projector = ProprioProjector(config.state_dim, width) if config.state_dim else None
        self.value_head = self._value_head()

    def init_heads(self) -> None:
        self.value_head = self._value_head()

    def write_config(self, directory: Path, stats: ActionStats) -> None:
        config = self.config
        written = {
            "model_type": "openvla",
            "architectures": ["OpenVLAForActionPrediction"],
            "use_fused_vision_backbone": True,
            "timm_model_ids": [size.timm_id for size in config.towers],
            "timm_override_act_layers": [None, None],
            "image_sizes": [size.image_size for size in config.towers],
            "image_resize_strategy": "resize-naive",
            "text_config": {"model_type": "llama", **config.language},
            "pad_to_multiple_of": config.vocab_padding,
            "n_action_bins": config.bins,
            "norm_stats": {OURS: to_published(stats)},
            OURS: msgspec.to_builtins(config, enc_hook=BaseModel.model_dump),
        }
        (directory / "config.json").write_text(json.dumps(written, indent=2) + "\n")

    def exact(self) -> list[list[nn.Module]]:
        """The critic."""
        return [] if self.value_head is None else [[self.value_head]]

    def blocks(self) -> list[nn.Module]:
        vision = self.vision_backbone
        towers = (vision.featurizer, vision.fused_featurizer)
        return [*(block for tower in towers for block in tower.blocks()), *self.language_model.model.layers]

    @torch.no_grad()
    def act(self, inputs: Inputs, *, randomness: Randomness, greedy: bool = False) -> Acted:
        """Sample the tokens of a chunk, or take the likeliest."""
        observed, count = self._observe(inputs), self.horizon * self.action_dim
        uniforms = None
        if not greedy:
            sampled = np.stack([generator.random(count) for generator in randomness.generators()])
            uniforms = torch.from_numpy(sampled).to(observed.embedded.device)
        parallel = self.config.family == "openvla_oft"
        hidden, tokens = self._act_at_once(observed, uniforms) if parallel else self._act_in_turn(observed, uniforms)
        chunk = self._as_chunk(tokens)
        logprobs = self.bins.gather(self._as_chunk(self._log_probs(hidden)), chunk)
        return Acted(
            actions=self.bins.decode(chunk),
            logprobs=torch.zeros_like(logprobs) if greedy else logprobs,
            values=self._values(hidden),
            replay={} if greedy else {"tokens": chunk.int()},
        )

    def evaluate(self, inputs: Inputs, replay: Replay, *, with_entropy: bool = False) -> ScoredActions:
        """Return the log-probabilities of `tokens` [B, H, D], in one forward pass."""
        tokens = replay["tokens"].long()
        hidden = self._hidden(self._observe(inputs), tokens.flatten(1))
        log_probs = self._as_chunk(self._log_probs(hidden))
        return ScoredActions(
            logprobs=self.bins.gather(log_probs, tokens),
            values=self._values(hidden),
            entropy=-(log_probs.exp() * log_probs).sum(-1) if with_entropy else None,
        )

    def supervised(
        self, inputs: Inputs, actions: Tensor, mask: Tensor, *, randomness: Randomness, aux: Tensor | None = None
    ) -> SupervisedLosses:
        """Cross-entropy of the demonstrated tokens among the action tokens, at temperature 1."""
        if aux is not None:
            raise ValueError(f"{aux.shape[1]} auxiliary targets: OpenVLA has no head for them, remove aux_columns")
        tokens = self.bins.encode(actions)
        hidden = self._hidden(self._observe(inputs), tokens.flatten(1))
        log_probs = self._as_chunk(self.bins.log_probs(self._logits(hidden), temperature=1.0))
        error = -self.bins.gather(log_probs, tokens).mean(-1)
        return SupervisedLosses(loss=masked_mean(error, mask))

    def _hidden(self, observed: Observed, tokens: Tensor) -> Tensor:
        """Return the outputs [B, H D, width] that predict `tokens` [B, H D]."""
        if self.config.family == "openvla_oft":
            return self._hidden_at_once(observed)
        embedded, mask = self._followed(observed, self._embed(tokens[:, :-1]))
        outputs = self._run(embedded, mask, seen=_causal(mask))
        return _before(outputs, observed, count=tokens.shape[1])

    def _hidden_at_once(self, observed: Observed) -> Tensor:
        """Return the same for OFT, whose inputs have zeros in place of action tokens."""
        count = self.horizon * self.action_dim
        blanks = observed.embedded.new_zeros(len(observed.mask), count, observed.embedded.shape[-1])
        end = self._embed(torch.full_like(observed.last[:, None], END))
        embedded, mask = self._followed(observed, torch.cat([blanks, end], dim=1))
        everyone = mask[:, None, None].expand(-1, 1, mask.shape[1], -1)
        return _before(self._run(embedded, mask, seen=everyone), observed, count=count)

    def _act_at_once(self, observed: Observed, uniforms: Tensor | None) -> tuple[Tensor, Tensor]:
        hidden = self._hidden_at_once(observed)
        return hidden, self.bins.pick(self._log_probs(hidden), uniforms)

    def _act_in_turn(self, observed: Observed, uniforms: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return outputs and tokens [B, H D], decoded autoregressively with a key-value cache."""
        from transformers import DynamicCache

        # Prompts of a batch have different lengths, padded at the end. The first action token is predicted at each
        # prompt's own last token; the following ones are appended behind the padding, which the mask hides, and
        # `_run` counts positions over unmasked tokens alone.
        kept, mask = DynamicCache(), observed.mask
        outputs = self._run(observed.embedded, mask, seen=_causal(mask), kept=kept)
        hidden, tokens = [outputs[torch.arange(len(mask), device=mask.device), observed.last]], []
        for place in range(self.horizon * self.action_dim):
            if place:
                mask = F.pad(mask, (0, 1), value=True)
                outputs = self._run(self._embed(tokens[-1][:, None]), mask, seen=mask[:, None, None], kept=kept)
                hidden.append(outputs[:, 0])
            uniform = None if uniforms is None else uniforms[:, place]
            tokens.append(self.bins.pick(self._log_probs(hidden[-1]), uniform))
        return torch.stack(hidden, dim=1), torch.stack(tokens, dim=1)

    def _run(self, embedded: Tensor, mask: Tensor, *, seen: Tensor, kept: object = None) -> Tensor:
        """Return outputs [B, n, width] of the last n positions. mask: [B, N]; seen: [B, 1, n, N] attention mask."""
        positions = (mask.cumsum(1) - 1).clamp(min=0)[:, -embedded.shape[1] :]
        model = self.language_model.model
        return model(
            inputs_embeds=embedded,
            attention_mask=seen,
            position_ids=positions,
            use_cache=kept is not None,
            **{cache_argument(model): kept},
        ).last_hidden_state

    def _observe(self, inputs: Inputs) -> Observed:
        words = self._embed(inputs.tokens)
        between = []
        if inputs.images.shape[1]:
            between.append(self.projector(self.vision_backbone(inputs.images)).to(words.dtype))
        if self.proprio_projector is not None:
            between.append(self.proprio_projector(inputs.state).to(words.dtype))
        seen = sum(part.shape[1] for part in between)
        mask = torch.cat(
            [inputs.token_mask[:, :1], inputs.token_mask.new_ones(len(words), seen), inputs.token_mask[:, 1:]], dim=1
        )
        return Observed(
            embedded=torch.cat([words[:, :1], *between, words[:, 1:]], dim=1),
            mask=mask,
            last=seen + inputs.token_mask.sum(1) - 1,
        )

    def _followed(self, observed: Observed, embedded: Tensor) -> tuple[Tensor, Tensor]:
        mask = F.pad(observed.mask, (0, embedded.shape[1]), value=True)
        return torch.cat([observed.embedded, embedded], dim=1), mask

    def _embed(self, tokens: Tensor) -> Tensor:
        return self.language_model.model.embed_tokens(tokens)

    def _logits(self, hidden: Tensor) -> Tensor:
        """[..., width] -> [..., N], for the action tokens alone."""
        first = self.bins.first
        return F.linear(hidden, self.language_model.lm_head.weight[first : first + self.bins.count])

    def _log_probs(self, hidden: Tensor) -> Tensor:
        return self.bins.log_probs(self._logits(hidden), temperature=self.config.temperature)

    def _value_head(self) -> Readout | None:
        if not self.value_dim:
            return None
        critic, width = self.config.critic, self.language_model.config.hidden_size
        return Readout(width, outputs=self.value_dim, pool="mean", hidden=critic.hidden, detach=critic.detach)

    def _as_chunk(self, x: Tensor) -> Tensor:
        """[B, H D, ...] -> [B, H, D, ...]."""
        return x.unflatten(1, (self.horizon, self.action_dim))

    def _values(self, hidden: Tensor) -> Tensor:
        if self.value_head is None:
            return hidden.new_zeros(len(hidden), 0, dtype=torch.float32)
        return self.value_head(hidden[:, :1], torch.ones(len(hidden), 1, dtype=torch.bool, device=hidden.device))


def _before(outputs: Tensor, observed: Observed, *, count: int) -> Tensor:
    """Return the outputs one position before each of the `count` tokens after the observation's S."""
    length = observed.mask.shape[1]
    first = outputs[torch.arange(len(outputs), device=outputs.device), observed.last]
    return torch.cat([first[:, None], outputs[:, length : length + count - 1]], dim=1)


def _causal(mask: Tensor) -> Tensor:
    """mask [B, N] -> causal attention mask, bool [B, 1, N, N]."""
    length = mask.shape[1]
    return mask[:, None, None] & torch.ones(length, length, dtype=torch.bool, device=mask.device).tril()


class ActionBins:
    """N action tokens with ids from `first` on."""

    def __init__(self, *, first: int, count: int) -> None:
        self.first, self.count = first, count
        edges = np.linspace(-1, 1, count)
        self._edges = torch.from_numpy(edges)
        centres = (edges[:-1] + edges[1:]) / 2
        self._numbers = torch.from_numpy(np.append(centres, centres[-1])[::-1].astype(np.float32))

    def encode(self, actions: Tensor) -> Tensor:
        """Actions [...], clipped to [-1, 1] -> ids [...] int64."""
        bins = torch.bucketize(actions.double().clamp(-1, 1), to_device(self._edges, actions.device), right=True)
        return self.first + self.count - bins

    def decode(self, tokens: Tensor) -> Tensor:
        """Ids [...] -> actions [...] float32."""
        return to_device(self._numbers, tokens.device)[tokens - self.first]

    def log_probs(self, logits: Tensor, *, temperature: float) -> Tensor:
        """Logits [..., N] of the action tokens -> log-probabilities among them alone, float32."""
        return torch.log_softmax(logits.float() / temperature, dim=-1)

    def pick(self, log_probs: Tensor, uniforms: Tensor | None) -> Tensor:
        """log_probs [..., N] -> ids [...]: the likeliest, or sampled with `uniforms` [...] in [0, 1)."""
        if uniforms is None:
            return self.first + log_probs.argmax(-1)
        # Inverse transform sampling: the index of the sampled bin is the number of bins whose cumulative probability is
        # at most the uniform number. In float64, since 256 float32 terms may sum to less than the largest uniform.
        reached = log_probs.double().exp().cumsum(-1) <= uniforms.double()[..., None]
        return self.first + reached.sum(-1).clamp(max=self.count - 1)

    def gather(self, log_probs: Tensor, tokens: Tensor) -> Tensor:
        """log_probs [..., N], ids [...] -> those of the ids [...]."""
        # a sum of one element, since the result of a sharded module must not be a view of another tensor
        return log_probs.gather(-1, (tokens - self.first)[..., None]).sum(-1)

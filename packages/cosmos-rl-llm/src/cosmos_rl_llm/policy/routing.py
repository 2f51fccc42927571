"""Routing of tokens to experts: counted in training, recorded in generation, replayed in training.

    rollout    router -> top k of its scores -> recorded: routes [tokens, layers, k]
    training   router -> its own scores of the recorded experts -> gates, with gradient

Training and generation round differently, so a router with nearly tied scores may choose different experts in the two,
and log-probabilities of the same weights differ much. Replaying the choice prevents this (rollout routing replay, R3,
arXiv:2510.11370); the gates remain those of the trained router.

`layers` are all decoder layers of the whole model; those without a router have zeros, which are not read.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from cosmos_rl_core.errors import UserError
from cosmos_rl_core.parallel.axes.expert import count_slots
from cosmos_rl_core.parallel.mesh import ReplicaMesh
from cosmos_rl_llm.model.causal_lm import decoder_layers
from cosmos_rl_llm.model.checkpoint import EXPERT_KEYS
from cosmos_rl_llm.policy.experts import is_experts

_ROUTERS = ("gate", "router")
"""Attribute names of the router of a layer with `experts`. It returns (logits, gates [N, k], experts [N, k])."""

_REPLAY = "route_replay"
"""Attribute of a router whose choice can be replayed: its `_Replay`."""


def routers(model: PreTrainedModel) -> dict[int, nn.Module]:
    """The routers by layer number, of the local layers; empty for a dense model."""
    by_layer: dict[int, nn.Module] = {}
    for name, module in model.named_modules():
        numbered = re.search(r"\blayers\.(\d+)\.", name)
        if numbered and is_experts(module):
            beside = dict(model.get_submodule(name.rpartition(".")[0]).named_children())
            by_layer |= {int(numbered[1]): beside[child] for child in _ROUTERS if child in beside}
    return by_layer


class RouteRecorder:
    """Records the choices of a model's routers. One thread runs the model and takes the routes.

    recorder = RouteRecorder(model)
    model(tokens)
    routes = recorder.take()
    """

    def __init__(self, model: PreTrainedModel) -> None:
        """Raises UserError for a model without routers."""
        by_layer = routers(model)
        if not by_layer:
            kind = type(model).__name__
            raise UserError(f"rollout.options.record_routes: {kind} has no routers; set it to false")
        self._num_layers, num_experts = _sizes(model)
        self._dtype = torch.uint8 if num_experts <= 256 else torch.int16
        self._chosen: dict[int, Tensor] = {}
        for layer, router in by_layer.items():
            router.register_forward_hook(partial(self._note, layer))

    def take(self) -> Tensor:
        """Return the routes [tokens, layers, k] of the last forward pass, uint8 or int16, and delete them."""
        first = next(iter(self._chosen.values()))
        routes = torch.zeros(len(first), self._num_layers, first.shape[1], dtype=self._dtype, device=first.device)
        for layer, experts in self._chosen.items():
            routes[:, layer] = experts
        self._chosen = {}
        return routes

    def _note(self, layer: int, router: nn.Module, inputs: Any, outputs: tuple[Tensor, ...]) -> None:
        chosen = _choice(outputs)
        if chosen is None:
            raise UserError(
                f"rollout.options.record_routes: {type(router).__name__} does not return the experts it chooses; "
                "set it to false"
            )
        self._chosen[layer] = chosen


class ExpertLoad:
    """Counts the tokens of each expert in training."""

    def __init__(self, model: PreTrainedModel) -> None:
        """Count in `model`, or a stage of a pipeline; a dense model has no counts."""
        self._shape = _sizes(model)
        self._counts: dict[int, Tensor] = {}
        for layer, router in routers(model).items():
            router.register_forward_hook(partial(self._count, layer))

    def take(self, mesh: ReplicaMesh | None) -> dict[str, float]:
        """Return the metrics of the step and reset; all ranks call it together.

        `expert_load_max` is the maximum load of an expert over the mean load, `expert_load_entropy` the entropy of the
        load over that of a uniform one; both are means over the layers with experts. `replayed_routes` is the share of
        the tokens whose experts were those of the rollout. Empty without counts.
        """
        num_layers, num_experts = self._shape
        if num_experts == 0:
            return {}
        here = [count.device for count in self._counts.values()]
        counts = torch.zeros(
            num_layers, num_experts + 2, dtype=torch.int64, device=mesh.device if mesh else next(iter(here), None)
        )
        for layer, count in self._counts.items():
            counts[layer] = count
        self._counts = {}
        sums = (counts if mesh is None else mesh.sum_over_all(counts)).cpu().double()  # one wait; the rest is small
        load, (replayed, chosen) = sums[:, :-2], sums[:, -2:].sum(dim=0).tolist()
        load = load[load.any(dim=1)]  # [layers with experts, E]
        if not len(load):
            return {}
        load = load / load.sum(dim=1, keepdim=True)
        entropy = torch.special.entr(load).sum(dim=1) / math.log(num_experts)
        return {
            "expert_load_max": (load.amax(dim=1) * num_experts).mean().item(),
            "expert_load_entropy": entropy.mean().item(),
            "replayed_routes": replayed / chosen,
        }

    def _count(self, layer: int, router: nn.Module, inputs: Any, outputs: tuple[Tensor, ...]) -> None:
        # Passes without gradient are not training. Ranks along tp, and recomputation, count all tokens of a layer
        # again, which does not change their proportions.
        chosen = _choice(outputs) if torch.is_grad_enabled() else None
        if chosen is not None:
            num_experts = self._shape[1]
            slots = max(_num_scores(router) or 0, num_experts)  # no-op experts come last and are not counted
            replay = vars(router).get(_REPLAY)  # `forward` itself may be wrapped by a region of tensor parallelism
            replays = replay is not None and replay.is_given
            slot_counts = count_slots(chosen.detach(), slots)[:num_experts]
            totals = [slot_counts.new_full((1,), total) for total in (replays * chosen.numel(), chosen.numel())]
            counts = torch.cat([slot_counts, *totals])
            self._counts[layer] = self._counts[layer] + counts if layer in self._counts else counts


def install_replay(model: PreTrainedModel) -> None:
    """Make each router choose the experts of the forward pass's keyword `routes` [tokens, layers, k], if given.

    The decoder passes the keyword to each layer's attention, like `layout`, so recomputation and concurrent
    microbatches get their own routes. Layers whose attention is not named `self_attn` do not receive it.
    """
    for layer, router in routers(model).items():
        beside = dict(decoder_layers(model)[layer].named_children())
        if "self_attn" in beside:
            num_layers, num_experts = _sizes(model)
            replay = _Replay(layer, router, num_layers=num_layers, num_experts=_num_scores(router) or num_experts)
            beside["self_attn"].register_forward_pre_hook(replay.listen, with_kwargs=True)
            router.forward = replay.route
            setattr(router, _REPLAY, replay)


def check_replay(model: PreTrainedModel) -> None:
    """Raise UserError if the choice of a router of `model` cannot be replayed."""
    for layer in routers(model):
        if "self_attn" not in dict(decoder_layers(model)[layer].named_children()):
            raise UserError(
                f"rollout.options.record_routes: {type(model).__name__} has no attention beside its routers to pass "
                "them the experts; set it to false"
            )


class _Replay:
    """The replayed choice of a layer's router, received by the attention before it in the same forward pass."""

    def __init__(self, layer: int, router: nn.Module, *, num_layers: int, num_experts: int) -> None:
        self._layer, self._num_layers = layer, num_layers
        self._kind = type(router).__name__
        self._choose = router.forward
        self._num_experts = num_experts
        self._chosen: Tensor | None = None

    @property
    def is_given(self) -> bool:
        """Whether the current pass replays."""
        return self._chosen is not None

    def listen(self, attention: nn.Module, inputs: Any, keywords: dict[str, Any]) -> None:
        routes: Tensor | None = keywords.get("routes")
        if routes is not None and routes.shape[1] != self._num_layers:
            raise UserError(
                f"rollout.options.record_routes: rollouts have experts of {routes.shape[1]} layers, and the policy has "
                f"{self._num_layers} layers"
            )
        self._chosen = None if routes is None else routes[:, self._layer]

    def route(self, *given: Any, **keywords: Any) -> Any:
        if self._chosen is None:
            return self._choose(*given, **keywords)
        mode = _Chosen(self._chosen, num_experts=self._num_experts)
        with mode:
            outputs = self._choose(*given, **keywords)
        if not mode.obeyed:
            raise UserError(
                f"rollout.options.record_routes: {self._kind} does not choose with torch.topk "
                "over all experts; set it to false"
            )
        return outputs


class _Chosen(TorchFunctionMode):
    """Makes `torch.topk` over scores [N, E] return the scores of `experts` [N, k], in their order.

    The family's own router thus computes the gates from the scores of these experts. A router that first chooses
    among groups of experts does so over fewer scores, without effect.
    """

    def __init__(self, experts: Tensor, *, num_experts: int) -> None:
        super().__init__()
        self.obeyed = False
        self._experts = experts
        self._shape = (len(experts), num_experts)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        keywords = kwargs or {}
        if func not in (torch.topk, Tensor.topk):
            return func(*args, **keywords)
        scores: Tensor = args[0] if args else keywords["input"]
        if scores.shape != self._shape:
            return func(*args, **keywords)
        self.obeyed = True
        k = args[1] if len(args) > 1 else keywords["k"]
        if k != self._experts.shape[1]:
            raise UserError(
                f"rollout.options.record_routes: rollouts have {self._experts.shape[1]} experts of a token, and the "
                f"policy chooses {k}"
            )
        return torch.return_types.topk((scores.gather(-1, self._experts), self._experts))


def _choice(outputs: Any) -> Tensor | None:
    """The experts [N, k] in a router's outputs; None if there are none."""
    tensors = [each for each in outputs if isinstance(each, Tensor)] if isinstance(outputs, tuple) else []
    integers = [each for each in tensors if each.ndim == 2 and not each.is_floating_point()]
    return integers[0] if len(integers) == 1 else None


def _num_scores(router: nn.Module) -> int | None:
    """Number of experts with scores, including no-op experts (LongCat); None for a router without a matrix."""
    matrices = [parameter for parameter in router.parameters() if parameter.ndim == 2]
    return matrices[-1].shape[0] if matrices else None


def _sizes(model: PreTrainedModel) -> tuple[int, int]:
    """Layers of the whole model, and experts of each; 0 experts in a dense model."""
    config = model.config.get_text_config()
    numbers = (getattr(config, key, None) for key in EXPERT_KEYS)
    return config.num_hidden_layers, next(filter(None, numbers), 0)

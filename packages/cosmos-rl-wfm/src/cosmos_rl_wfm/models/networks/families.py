"""Selects the family of a network by its class, and defines the families that are called by their signature.

These take latents, timesteps of 0 .. 1000 and text, such as SD3.5, Sana and Sana-Video. Which other arguments a class
takes is read from its signature.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from cosmos_rl_core.errors import UserError
from cosmos_rl_wfm.models.base import Condition
from cosmos_rl_wfm.models.classes import network_class
from cosmos_rl_wfm.models.networks.cosmos import Cosmos
from cosmos_rl_wfm.models.networks.family import Family, parameter_dtype
from cosmos_rl_wfm.models.networks.wan import Wan

_GIVEN = {"self", "hidden_states", "timestep", "encoder_hidden_states", "encoder_attention_mask", "pooled_projections"}
_PACKED = {"img_ids", "img_shapes", "num_frames"}
"""Arguments of networks that take latents as a sequence of patches (Flux, Qwen-Image, LTX): not supported."""
_TEXT_WIDTHS = ("joint_attention_dim", "caption_channels", "text_dim", "text_embed_dim", "cross_attention_dim")


class FlowTransformer(Family):
    """A network called by its signature: hidden_states, timestep, encoder_hidden_states, maybe mask and pooled text."""

    def __init__(self, config: Mapping[str, Any], *, network: type[nn.Module]) -> None:
        """Raises UserError for a class that requires other arguments."""
        super().__init__(config)
        parameters = inspect.signature(network.forward).parameters
        needed = {name for name, parameter in parameters.items() if parameter.default is parameter.empty}
        variadic = {name for name, parameter in parameters.items() if parameter.kind.name.startswith("VAR_")}
        unknown = sorted((needed - _GIVEN - variadic) | (_PACKED & set(parameters)))
        lacking = sorted({"hidden_states", "timestep", "encoder_hidden_states"} - set(parameters))
        if unknown or lacking:
            what = f"needs {', '.join(unknown)}" if unknown else f"takes no {', '.join(lacking)}"
            raise UserError(
                f"model: {network.__name__} {what} in its forward pass; supported are networks that are called with "
                "hidden_states, timestep and encoder_hidden_states, such as SD3.5, Sana and Sana-Video"
            )
        self._takes = set(parameters)
        self.patch, self.only_images = self._patches(network.__name__)
        self.channels = self._value("in_channels")
        self.text_width = self._text_width()
        self.pooled_width = config.get("pooled_projection_dim") if "pooled_projections" in parameters else None
        reach = config.get("pos_embed_max_size")
        self.largest = (1, reach * self.patch[1], reach * self.patch[2]) if reach else None
        self._time_scale = 1000.0 * config.get("timestep_scale", 1.0)

    def velocity(self, network: nn.Module, latents: Tensor, times: Tensor, condition: Condition) -> Tensor:
        if condition.given is not None:
            raise UserError(f"{type(network).__name__} takes no given frames: set model.given max_frames = 0")
        condition = condition.gathered()
        dtype = parameter_dtype(network)
        more: dict[str, Tensor] = {}
        if "encoder_attention_mask" in self._takes:
            more["encoder_attention_mask"] = condition.text_mask.long()
        if "pooled_projections" in self._takes:
            if condition.pooled is None:
                raise UserError(
                    f"{type(network).__name__} takes a pooled vector of each caption, which cached embeddings lack: "
                    'set text.encoder = "model"'
                )
            more["pooled_projections"] = condition.pooled.to(dtype)
        v = network(
            hidden_states=(latents[:, :, 0] if self.only_images else latents).to(dtype),
            timestep=times * self._time_scale,
            encoder_hidden_states=condition.text.to(dtype),
            return_dict=False,
            **more,
        )[0]
        return v.unsqueeze(2) if self.only_images else v

    def _patches(self, name: str) -> tuple[tuple[int, int, int], bool]:
        """Latent frames, rows and columns of a token, and whether there are no frames."""
        size, frames = self._value("patch_size"), self.config.get("patch_size_t")
        match size:
            case int():
                return (frames or 1, size, size), frames is None
            case [int(first), int(second), int(third)]:
                return (first, second, third), False
        raise UserError(f"model: {name} with patch_size = {size} is not supported; a number and three numbers are")

    def _text_width(self) -> int:
        for key in _TEXT_WIDTHS:
            if self.config.get(key) is not None:
                return self.config[key]
        raise UserError(f"model: the network's configuration has none of {', '.join(_TEXT_WIDTHS)}")


class StableDiffusion3(FlowTransformer):
    """SD3Transformer2DModel."""

    text_length = 256


class Sana(FlowTransformer):
    """SanaTransformer2DModel and SanaVideoTransformer3DModel."""

    text_length = 300

    def __init__(self, config: Mapping[str, Any], *, network: type[nn.Module]) -> None:
        super().__init__(config, network=network)
        if config.get("guidance_embeds"):
            raise UserError(
                f"model: a {network.__name__} with guidance_embeds (Sana-Sprint) is no flow-matching model: it takes "
                "TrigFlow's times; give the Sana that it was distilled from"
            )


def make_family(class_name: str, config: Mapping[str, Any]) -> Family:
    """Bind the family of a network's class to the network's configuration, defaults of the class included.

    Raises UserError for a network whose call is not supported.
    """
    row = network_class(class_name)
    name = "flow" if row is None else row.family
    if name == "wan":
        return Wan(config)
    if name == "cosmos":
        return Cosmos(config)
    import diffusers

    network = getattr(diffusers, class_name, None)
    if network is None:
        raise UserError(f"model: diffusers {diffusers.__version__} has no model class {class_name!r}")
    kinds = {"sd3": StableDiffusion3, "sana": Sana, "sana_video": Sana}
    return kinds.get(name, FlowTransformer)(config, network=network)

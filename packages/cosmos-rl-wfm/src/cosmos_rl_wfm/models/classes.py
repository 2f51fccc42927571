"""Supported and refused classes of diffusers, and checks of their configurations. No torch.

network      the family that calls it, and the layers that get adapters
autoencoder  the compression of its latents
scheduler    whether the network predicts noise - data at times from 1 to 0
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cosmos_rl_core.errors import UserError
from cosmos_rl_core.storage.json_files import check_fields
from cosmos_rl_wfm.models.config import FamilyName

ATTENTION = ("to_q", "to_k", "to_v", "to_out.0")
"""The projections of diffusers' attention layers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkClass:
    """A class of networks whose conventions are tested against its own pipeline."""

    family: FamilyName
    name: str
    """Class name in diffusers."""
    lora_targets: tuple[str, ...] = ATTENTION
    """Ends of the names of the layers that get adapters, unless the recipe lists others."""


NETWORKS = (
    NetworkClass(family="wan", name="WanTransformer3DModel"),
    NetworkClass(
        family="cosmos", name="CosmosTransformer3DModel", lora_targets=(*ATTENTION, "ff.net.0.proj", "ff.net.2")
    ),
    NetworkClass(
        family="sd3",
        name="SD3Transformer2DModel",
        lora_targets=(*ATTENTION, "add_q_proj", "add_k_proj", "add_v_proj"),  # both streams of its joint attention
    ),
    NetworkClass(family="sana", name="SanaTransformer2DModel"),
    NetworkClass(family="sana_video", name="SanaVideoTransformer3DModel"),
    NetworkClass(family="flow", name="SkyReelsV2Transformer3DModel"),
)

REFUSED: Mapping[str, str] = {
    "AllegroTransformer3DModel": "is no flow-matching model: it predicts the noise",
    "AuraFlowTransformer2DModel": "takes times of 0 .. 1, where times of 0 .. 1000 are passed",
    "ChronoEditTransformer3DModel": "edits an image that it is given beside the text",
    "CogVideoXTransformer3DModel": "is no flow-matching model: it predicts a velocity of variance-preserving diffusion",
    "ConsisIDTransformer3DModel": "is no flow-matching model: it predicts a velocity of variance-preserving diffusion",
    "HeliosTransformer3DModel": "continues a video that it is given beside the text",
    "JoyImageEditTransformer3DModel": "edits an image that it is given beside the text",
    "LatteTransformer3DModel": "is no flow-matching model: it predicts the noise",
    "MochiTransformer3DModel": "predicts data - noise, at times that run backwards",
    "PixArtTransformer2DModel": "is no flow-matching model: it predicts the noise",
    "Transformer2DModel": "is no flow-matching model: it predicts the noise",
}
"""Classes that accept latents, times and text, but were trained with other targets or inputs than ours."""

_PREDICTS_FLOW = "flow_prediction"
_SCHEDULER_USED = ("_class_name", "prediction_type", "flow_shift", "shift", "invert_sigmas", "use_dynamic_shifting")
_SCHEDULER_FIXED: Mapping[str, tuple[Any, ...]] = {
    "num_train_timesteps": (1000,),
    "use_flow_sigmas": (True,),
    "thresholding": (False,),
    "sigma_min": (None, 0.01),  # of the schedule "edm"
    "sigma_max": (None, 200, 200.0),
    "shift_terminal": (None,),
    "scale_factors": (None,),  # of growing resolutions
}
_SCHEDULER_WITHOUT_EFFECT = (
    "_diffusers_version",
    # [rollout.sampling] chooses the solver, its noise and its schedule of times
    *("use_karras_sigmas", "use_exponential_sigmas", "use_beta_sigmas", "use_lu_lambdas", "final_sigmas_type"),
    *("solver_order", "solver_type", "solver_p", "algorithm_type", "predictor_order", "corrector_order", "tau_func"),
    *("predict_x0", "disable_corrector", "lower_order_final", "euler_at_final", "stochastic_sampling"),
    *("timestep_spacing", "steps_offset", "lambda_min_clipped", "variance_type"),
    # of what is off: thresholds, shifts by resolution, growing resolutions
    *("dynamic_thresholding_ratio", "sample_max_value", "upscale_mode"),
    *("base_shift", "max_shift", "base_image_seq_len", "max_image_seq_len", "time_shift_type"),
    # of noise that is no flow's
    *("beta_start", "beta_end", "beta_schedule", "trained_betas", "rescale_betas_zero_snr"),
    *("clip_sample", "set_alpha_to_one", "skip_prk_steps"),  # other schedulers' fields, which diffusers keeps
)


def network_class(name: str) -> NetworkClass | None:
    """Return the row of a class of networks; None for one whose conventions are not tested here."""
    return next((row for row in NETWORKS if row.name == name), None)


def class_of(family: FamilyName) -> str:
    """Return the class of a family's networks."""
    return next(row.name for row in NETWORKS if row.family == family)


def check_network(name: str, *, claimed: bool) -> None:
    """Raise UserError for a class that is refused, or is unknown and not `claimed` to be of family "flow"."""
    if name in REFUSED:
        raise UserError(f"model: {name} {REFUSED[name]}; supported are {_supported()}")
    if network_class(name) is None and not claimed:
        raise UserError(
            f"model: {name} is unknown; supported are {_supported()}. If it takes latents, times of 0 .. 1000 "
            'and text, and predicts noise - data, set model.family = "flow"'
        )


def check_scheduler(config: Mapping[str, Any], *, shift: float | None = None) -> None:
    """Raise UserError where a pipeline's scheduler belongs to a network that is no flow-matching model.

    Also for fields that would be read without their effect. shift: the recipe's, in place of the scheduler's.
    """
    name = str(config.get("_class_name"))
    if config.get("invert_sigmas"):
        raise UserError(
            f"model.path: the pipeline's {name} has invert_sigmas = true: its network predicts data - noise at times "
            "that run backwards, which is not supported"
        )
    predicted = config.get("prediction_type", "epsilon")  # diffusers' default
    if not name.startswith("FlowMatch") and predicted != _PREDICTS_FLOW:
        raise UserError(
            f'model.path: the pipeline\'s {name} has prediction_type = "{predicted}", so that its network is no '
            "flow-matching model; supported are the FlowMatch schedulers, and others with prediction_type = "
            f'"{_PREDICTS_FLOW}"'
        )
    if config.get("use_dynamic_shifting") and shift is None:
        raise UserError(
            f"model.path: the pipeline's {name} has use_dynamic_shifting = true, a shift that depends on the size, "
            "which is not supported: set model.shift"
        )
    check_fields(
        config,
        used=_SCHEDULER_USED,
        fixed=_SCHEDULER_FIXED,
        without_effect=_SCHEDULER_WITHOUT_EFFECT,
        where=f"model.path: scheduler/scheduler_config.json of {name}",
    )


def compression(name: str, config: Mapping[str, Any]) -> tuple[int, int, int]:
    """Return an autoencoder's latent channels, frames per latent frame, and pixels per latent pixel on a side.

    `config` is that of diffusers; missing keys have the defaults of the class. Raises UserError for an autoencoder
    that is not supported.
    """
    if name not in _AUTOENCODERS:
        raise UserError(f"model: the autoencoder {name} is not supported; {', '.join(_AUTOENCODERS)} are")
    config = {**_AUTOENCODERS[name], **config}
    if name == "AutoencoderKL":
        if any(config.get(key) is not None for key in ("latents_mean", "latents_std")):
            raise UserError(
                "model: an AutoencoderKL with latents_mean and latents_std is not supported: its latents are shifted "
                "and scaled as a whole"
            )
        return config["latent_channels"], 1, 2 ** (len(config["block_out_channels"]) - 1)
    if name == "AutoencoderDC":
        return config["latent_channels"], 1, 2 ** (len(config["encoder_block_out_channels"]) - 1)
    halvings = config["temperal_downsample"]
    temporal, spatial = 2 ** sum(halvings), 2 ** len(halvings) * (config["patch_size"] or 1)
    if temporal != 4:
        raise UserError(f"model: an AutoencoderKLWan that packs {temporal} frames is not supported; 4 are")
    factors = {"scale_factor_temporal": temporal, "scale_factor_spatial": spatial}
    for key, factor in factors.items():
        if config.get(key, factor) != factor:
            raise UserError(f"model: an AutoencoderKLWan with {key} = {config[key]} packs {factor} by its layers")
    return config["z_dim"], temporal, spatial


_AUTOENCODERS: Mapping[str, Mapping[str, Any]] = {
    "AutoencoderKLWan": {"z_dim": 16, "temperal_downsample": (False, True, True), "patch_size": None},
    "AutoencoderKL": {"latent_channels": 4, "block_out_channels": (64,)},
    "AutoencoderDC": {"latent_channels": 32, "encoder_block_out_channels": (128, 256, 512, 512, 1024, 1024)},
}
"""Defaults of the classes in diffusers."""


def _supported() -> str:
    return ", ".join(row.name for row in NETWORKS)

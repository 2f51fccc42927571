"""Every field of diffusers' configurations is used, has its default, has no effect here, or is refused by name."""

import inspect

import diffusers
import pytest
from diffusers import SchedulerMixin

from cosmos_rl_core.errors import UserError
from cosmos_rl_wfm.models.classes import NETWORKS, check_scheduler, compression
from cosmos_rl_wfm.models.networks.families import make_family
from cosmos_rl_wfm.models.weights import empty_network, with_defaults

UNIPC = {"_class_name": "UniPCMultistepScheduler", "prediction_type": "flow_prediction", "use_flow_sigmas": True}


def schedulers_of_flow():
    """Return the names of the schedulers that networks here are published with."""
    for name in dir(diffusers):
        kind = getattr(diffusers, name) if name.endswith("Scheduler") and "Flax" not in name else None
        if isinstance(kind, type) and issubclass(kind, SchedulerMixin):
            parameters = inspect.signature(kind.__init__).parameters
            if name.startswith("FlowMatch") or "flow_shift" in parameters:
                yield name


def fields_of(name):
    parameters = inspect.signature(getattr(diffusers, name).__init__).parameters
    return {key: each.default for key, each in parameters.items() if key not in ("self", "args", "kwargs")}


def test_every_field_of_the_schedulers_is_known():
    names = list(schedulers_of_flow())
    assert {"FlowMatchEulerDiscreteScheduler", "UniPCMultistepScheduler", "DPMSolverMultistepScheduler"} <= set(names)
    for name in names:
        of_flow = {"prediction_type": "flow_prediction", "use_flow_sigmas": True}
        fields = {**fields_of(name)}
        check_scheduler({"_class_name": name, **fields, **{key: of_flow[key] for key in of_flow if key in fields}})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_train_timesteps", 500),
        ("use_flow_sigmas", False),
        ("use_dynamic_shifting", True),
        ("thresholding", True),
        ("shift_terminal", 0.02),
        ("sigma_max", 80.0),
        ("sigma_min", 0.002),
        ("invert_sigmas", True),
        ("prediction_type", "epsilon"),
        ("memory_layers", 3),
    ],
)
def test_a_field_of_a_scheduler_that_would_have_no_effect_is_refused_by_name(field, value):
    with pytest.raises(UserError, match=field):
        check_scheduler({**UNIPC, field: value})


def test_a_shift_by_resolution_is_replaced_by_the_recipes():
    check_scheduler({**UNIPC, "use_dynamic_shifting": True}, shift=3.0)


def test_the_schedule_of_cosmos_is_taken():
    check_scheduler({**UNIPC, "use_karras_sigmas": True, "sigma_min": 0.01, "sigma_max": 200.0, "flow_shift": 1.0})


@pytest.mark.parametrize(
    ("name", "config", "reason"),
    [
        ("AutoencoderKL", {"latents_mean": [0.1] * 4}, "latents_mean"),
        ("AutoencoderKLWan", {"scale_factor_spatial": 16}, "scale_factor_spatial = 16 packs 8 by its layers"),
        ("AutoencoderKLWan", {"scale_factor_temporal": 8}, "scale_factor_temporal = 8 packs 4 by its layers"),
    ],
)
def test_a_field_of_an_autoencoder_that_would_have_no_effect_is_refused_by_name(name, config, reason):
    with pytest.raises(UserError, match=reason):
        compression(name, config)


def test_the_autoencoder_of_wan_2_2_is_taken():
    config = {"z_dim": 48, "patch_size": 2, "scale_factor_spatial": 16, "scale_factor_temporal": 4}
    assert compression("AutoencoderKLWan", config) == (48, 4, 16)


@pytest.mark.parametrize(
    "name", [row.name for row in NETWORKS] + ["AutoencoderKLWan", "AutoencoderKL", "AutoencoderDC"]
)
def test_a_field_that_diffusers_does_not_have_is_refused_by_name(name):
    import torch

    with pytest.raises(UserError, match=f"{name} has no argument memory_layers"):
        empty_network(name, {"memory_layers": 3}, dtype=torch.float32)


@pytest.mark.parametrize("name", ["SanaTransformer2DModel", "SanaVideoTransformer3DModel"])
def test_a_distilled_network_is_refused_by_name(name):
    with pytest.raises(UserError, match="guidance_embeds"):
        make_family(name, {**with_defaults(name, {}), "guidance_embeds": True})

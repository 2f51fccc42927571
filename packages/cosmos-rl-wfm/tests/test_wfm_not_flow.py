"""Networks that are no flow-matching models, or want more than latents, times and text: refused, with the reason."""

import json
import subprocess
import sys

import pytest
import torch
from wfm_fixtures import pixel_model, recipe

from cosmos_rl_core.errors import UserError
from cosmos_rl_core.launch.check import check
from cosmos_rl_core.recipe.load import load_config
from cosmos_rl_core.settings.base import ConfigError
from cosmos_rl_wfm.models.build import build_model
from cosmos_rl_wfm.models.classes import NETWORKS, REFUSED, check_network, check_scheduler
from cosmos_rl_wfm.models.config import WFMModelConfig
from cosmos_rl_wfm.models.dry_run import try_forward
from cosmos_rl_wfm.models.networks.tiny import tiny_network

FLOW = {"_class_name": "FlowMatchEulerDiscreteScheduler", "shift": 3.0}
UNIPC = {"_class_name": "UniPCMultistepScheduler", "prediction_type": "flow_prediction", "use_flow_sigmas": True}


def pipeline(root, class_name, *, scheduler=None, **config):
    """A pipeline's folder with configurations alone."""
    parts = {"transformer": {"_class_name": class_name, **config}, "scheduler": scheduler}
    parts = {name: values for name, values in parts.items() if values is not None}
    for name, values in parts.items():
        (root / name).mkdir()
        file = "scheduler_config.json" if name == "scheduler" else "config.json"
        (root / name / file).write_text(json.dumps(values))
    index = {name: ["diffusers", values["_class_name"]] for name, values in parts.items()}
    (root / "model_index.json").write_text(json.dumps(index))
    return root


def section(folder, **keys):
    return pixel_model(path=str(folder), network={}, family="auto").model_copy(update=keys)


def problems_of(model):
    written = model.model_dump(mode="json", exclude_none=True)
    with pytest.raises(ConfigError) as found:
        check(load_config(recipe(model=written)))
    return str(found.value)


@pytest.mark.parametrize(
    ("scheduler", "reason"),
    [
        (
            {"_class_name": "DPMSolverMultistepScheduler", "prediction_type": "epsilon"},
            '"epsilon", so that its network',
        ),
        ({"_class_name": "DDIMScheduler"}, '"epsilon"'),  # what diffusers takes where nothing is said
        ({"_class_name": "CogVideoXDDIMScheduler", "prediction_type": "v_prediction"}, '"v_prediction"'),
        ({"_class_name": "EDMEulerScheduler", "prediction_type": "epsilon"}, '"epsilon"'),  # Cosmos 1.0
        ({"_class_name": "SCMScheduler", "prediction_type": "trigflow"}, '"trigflow"'),  # Sana-Sprint
        ({**UNIPC, "prediction_type": "epsilon"}, '"epsilon"'),
        ({**FLOW, "invert_sigmas": True}, "data - noise at times that run backwards"),  # Mochi
    ],
)
def test_a_pipeline_whose_scheduler_is_none_of_flow_matching_is_refused(tmp_path, scheduler, reason):
    folder = pipeline(tmp_path, "WanTransformer3DModel", scheduler=scheduler, **tiny_network("wan", codec="pixels"))
    with pytest.raises(UserError, match=reason):
        build_model(section(folder))
    assert reason.split(":")[0] in problems_of(section(folder)).replace("\n", " ")


@pytest.mark.parametrize("scheduler", [FLOW, UNIPC])
def test_schedulers_of_flow_matching_are_taken(scheduler):
    check_scheduler(scheduler)


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("family", ["auto", "flow"])
def test_a_network_alone_is_refused_by_its_class(tmp_path, name, family):
    folder = pipeline(tmp_path, name, patch_size=2, in_channels=4, cross_attention_dim=8)
    with pytest.raises(UserError, match=f"{name} {REFUSED[name]}"):
        build_model(section(folder, family=family))
    assert name in problems_of(section(folder, family=family))


def test_a_class_that_is_not_known_is_taken_only_where_the_recipe_calls_it_flow():
    with pytest.raises(UserError, match=r'NewTransformer2DModel is unknown; .* set model.family = "flow"'):
        check_network("NewTransformer2DModel", claimed=False)
    check_network("NewTransformer2DModel", claimed=True)


def test_the_family_of_a_recipe_must_be_that_of_the_class(tmp_path):
    folder = pipeline(tmp_path, "WanTransformer3DModel", **tiny_network("wan", codec="pixels"))
    with pytest.raises(UserError, match=r'a WanTransformer3DModel, of "wan"; set family = "wan"'):
        build_model(section(folder, family="sd3"))
    for family in ("auto", "wan"):
        with pytest.raises(UserError, match="no safetensors"):  # beyond the checks
            build_model(section(folder, family=family))


# Each of them raised what its own code raised: unpacking, NoneType, 'NoneType' object is not subscriptable.
@pytest.mark.parametrize(
    ("name", "config", "reason"),
    [
        (
            "HunyuanVideoTransformer3DModel",
            {"num_layers": 1, "num_single_layers": 1},
            "times and text: 'NoneType' object",
        ),
        ("EasyAnimateTransformer3DModel", {}, "patch_size = None is not supported"),
        ("HunyuanImageTransformer2DModel", {"num_layers": 1}, r"patch_size = \(1, 1\) is not supported"),
    ],
)
def test_a_network_that_wants_more_is_refused_by_check_without_a_traceback(name, config, reason):
    network = {"_class_name": name, **config}
    model = WFMModelConfig.model_validate(
        {"family": "flow", "network": network, "codec": "pixels", "text": {"encoder": "words"}}
    )
    with pytest.raises(UserError, match=reason):
        build_model(model)
    assert name in problems_of(model)


def test_a_network_of_more_outputs_than_latents_is_not_cut_to_them():
    """A learned variance belongs to models that predict noise."""
    config = {"num_layers": 1, "num_attention_heads": 2, "attention_head_dim": 8, "cross_attention_dim": 16}
    config |= {"num_cross_attention_heads": 2, "cross_attention_head_dim": 8, "caption_channels": 8, "in_channels": 4}
    with pytest.raises(UserError, match=r"makes \[1, 8, 1, 8, 8\] of latents \[1, 4, 1, 8, 8\]"):
        try_forward("SanaTransformer2DModel", {**config, "out_channels": 8, "patch_size": 1})


def test_nothing_is_allocated_for_the_pass_that_is_tried():
    state = torch.random.get_rng_state()
    try_forward("SD3Transformer2DModel", {"num_layers": 1, "num_attention_heads": 512, "caption_projection_dim": 32768})
    assert torch.equal(torch.random.get_rng_state(), state)  # some 100 GB of uninitialised weights


def test_a_recipe_of_a_known_class_is_checked_without_torch():
    code = (
        "import sys\n"
        "from cosmos_rl_wfm.domain import WFM\n"
        "model = WFM.Model(family='wan', tiny=True, text={'encoder': 'words'})\n"
        "WFM.check_model(model)\n"
        "print([m for m in ('torch', 'diffusers') if m in sys.modules])\n"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert found.stdout.strip() == "[]"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_transformer_of_diffusers_works_or_is_refused_with_a_reason():
    """At the sizes of its defaults. A class that passes must be in the table: its conventions are tested."""
    import diffusers

    names = {name for name in dir(diffusers) if "Transformer" in name and name.endswith("Model")}
    works = set()
    for name in sorted(names):
        try:
            check_network(name, claimed=True)
            try_forward(name, {})
        except UserError as error:
            assert len(str(error)) > len(name) + 10, name
        else:
            works.add(name)
    assert works == {row.name for row in NETWORKS}
    assert len(names) >= 60

"""pi models in the forms of lerobot and openpi: weights, configs, statistics, and what has no place there."""

import hashlib
import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file as load_arrays
from safetensors.torch import save_file
from vla_fixtures import load_pi, small_pi

from cosmos_rl_core.errors import UserError
from cosmos_rl_vla.actions import ActionStats, Gripper, Spread
from cosmos_rl_vla.config import ActionNoiseSection as Noise
from cosmos_rl_vla.config import CriticSection as Critic
from cosmos_rl_vla.config import VLADataConfig, VLAModelConfig
from cosmos_rl_vla.models.checkpoint import HEADS
from cosmos_rl_vla.models.pi.config import full
from cosmos_rl_vla.models.pi.export import camera_names, export_pi, public_tensors, write_lerobot, write_openpi
from cosmos_rl_vla.models.pi.family import random_pi, read_config
from cosmos_rl_vla.models.pi.model import PiModel

PI0 = small_pi(family="pi0", state="suffix", prompt="pi0", value=Critic(place="expert", pool="mean", hidden=(16,)))
PI05 = replace(PI0, family="pi05", state="text", prompt="pi05", value=Critic(pool="mean", hidden=(16,)))
FAMILIES = pytest.mark.parametrize("config", [PI0, PI05], ids=["pi0", "pi05"])
KINDS = pytest.mark.parametrize("kind", ["quantile", "mean_std"])
PUBLIC = full("pi05", horizon=10, action_dim=7)
RNG = np.random.default_rng(0)
DEMOS = np.concatenate(
    [RNG.normal(size=(50, 5)) * [1, 0.01, 30, 2e-4, 1] + 0.5, np.full((50, 2), [[0.7, 300.0]])], 1
).astype(np.float32)
UNIT = ActionStats(action=Spread.of(DEMOS), state=Spread.of(DEMOS))


def stats_of(kind):
    mask = np.array([True, True, True, True, False, True, True])
    spread = Spread.of(DEMOS, kind=kind, mask=mask)
    return ActionStats(action=spread, state=spread)


@FAMILIES
@pytest.mark.parametrize(("write", "prefix"), [(write_lerobot, "model."), (write_openpi, "")])
def test_weights_come_back_to_the_bit_and_heads_stay_behind(config, write, prefix, tmp_path):
    model = random_pi(replace(config, noise=Noise(kind="learned", steps="all"), aux_dim=2), seed=0)
    tensors = {model.names.public_name(name): tensor for name, tensor in model.state_dict().items()}
    save_file(dict(public_tensors(tensors.items(), prefix=prefix)), tmp_path / "model.safetensors")
    write(config, UNIT, tmp_path)
    loaded, fresh = load_pi(tmp_path, config=model.config, seed=1)
    assert {name.split(".", 1)[0] for name in fresh} == {"value_head", "aux_head", "denoiser"}
    own, found = model.state_dict(), loaded.state_dict()
    assert all(torch.equal(own[name], found[name]) for name in own if not name.startswith(HEADS))


@pytest.mark.parametrize(
    ("family", "count", "digest"),
    [("pi05", 812, "4e4cb28c8a19ec93"), ("pi0", 777, "1d47b8b98cbc3d89")],
)
def test_names_and_shapes_are_those_of_lerobots_classes(family, count, digest):
    # the digest is of PI0Policy and PI05Policy of lerobot 0.6.2 on transformers 5.5.4, without the tied embeddings
    with torch.device("meta"):
        model = PiModel(full(family, horizon=10, action_dim=7))
    public = ((model.names.public_name(name), tensor) for name, tensor in model.state_dict().items())
    lines = sorted(f"{name} {list(tensor.shape)}" for name, tensor in public_tensors(public, prefix="model."))
    assert len(lines) == count
    assert hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16] == digest


@pytest.mark.parametrize("family", ["pi0", "pi05"])
def test_the_configs_of_lerobot_and_openpi_read_back(family, tmp_path):
    config = replace(full(family, horizon=10, action_dim=7), num_steps=10)
    write_lerobot(config, UNIT, tmp_path, cameras=["observation.images.top"])
    assert read_config(tmp_path) == config
    norm = "dense.weight" if family == "pi05" else "weight"
    name = f"paligemma_with_expert.gemma_expert.model.layers.0.input_layernorm.{norm}"
    save_file({name: torch.zeros(1)}, tmp_path / "model.safetensors")
    write_openpi(config, UNIT, tmp_path)
    assert read_config(tmp_path) == replace(config, horizon=50, action_dim=32, num_steps=5)  # not in openpi's file


def test_the_config_of_lerobot_has_what_it_reads(tmp_path):
    write_lerobot(PUBLIC, UNIT, tmp_path, cameras=["observation.images.top"], dtype="bfloat16")
    assert json.loads((tmp_path / "config.json").read_text()) == {
        "type": "pi05",
        "n_obs_steps": 1,
        "input_features": {
            "observation.images.top": {"type": "VISUAL", "shape": [3, 224, 224]},
            "observation.state": {"type": "STATE", "shape": [7]},
        },
        "output_features": {"action": {"type": "ACTION", "shape": [7]}},
        "device": None,
        "paligemma_variant": "gemma_2b",
        "action_expert_variant": "gemma_300m",
        "dtype": "bfloat16",
        "chunk_size": 50,
        "n_action_steps": 10,
        "max_state_dim": 32,
        "max_action_dim": 32,
        "num_inference_steps": 5,
        "image_resolution": [224, 224],
        "tokenizer_max_length": 200,
        "normalization_mapping": {"VISUAL": "IDENTITY", "STATE": "QUANTILES", "ACTION": "QUANTILES"},
    }


def test_cameras_that_nobody_named_are_left_to_lerobot(tmp_path):
    write_lerobot(PUBLIC, UNIT, tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["input_features"] == {}


@pytest.mark.parametrize(
    ("config", "names"),
    [
        (
            PI0,
            "rename_observations to_batch pi0_new_line tokenizer device normalizer",
        ),
        (
            PI05,
            "rename_observations to_batch normalizer pi05_prepare_state_tokenizer tokenizer device",
        ),
    ],
    ids=["pi0", "pi05"],
)
def test_the_pipelines_have_the_steps_of_lerobot(config, names, tmp_path):
    write_lerobot(config, UNIT, tmp_path)
    before, after = (
        json.loads((tmp_path / f"policy_{name}processor.json").read_text())["steps"] for name in ("pre", "post")
    )
    found = [step["registry_name"].removesuffix("_step").removesuffix("_processor") for step in before]
    assert found == names.split()
    assert [step["registry_name"] for step in after] == ["unnormalizer_processor", "device_processor"]
    for step in (*before, *after):
        if "state_file" in step:
            assert set(load_arrays(tmp_path / step["state_file"])) >= {"action.q01", "action.std"}
    prompt = [step["config"] for step in before if step["registry_name"].startswith("pi05")]
    assert prompt in ([], [{"max_state_dim": 7}])  # lerobot 0.4 would write zeros up to 32


def lerobot_normalise(x, numbers, mode):
    """As lerobot's NormalizerProcessorStep has it."""
    x = x.astype(np.float32)
    if mode == "MEAN_STD":
        return (x - numbers["mean"]) / (numbers["std"] + np.float32(1e-8))
    width = numbers["q99"] - numbers["q01"]
    return 2 * (x - numbers["q01"]) / np.where(width == 0, np.float32(1e-8), width) - 1


def openpi_normalise(x, numbers, *, quantiles):
    """As openpi's transforms.Normalize has it."""
    q01, q99, mean, std = (np.array(numbers[name]) for name in ("q01", "q99", "mean", "std"))
    return (x - q01) / (q99 - q01 + 1e-6) * 2 - 1 if quantiles else (x - mean) / (std + 1e-6)


@KINDS
@FAMILIES
def test_lerobot_normalises_as_training_did_and_its_folder_reads_back(kind, config, tmp_path):
    stats = stats_of(kind)
    write_lerobot(config, stats, tmp_path)
    step = next(
        s for s in json.loads((tmp_path / "policy_preprocessor.json").read_text())["steps"] if "state_file" in s
    )
    held = load_arrays(tmp_path / step["state_file"])
    numbers = {name.rpartition(".")[2]: held[name] for name in held if name.startswith("observation.state.")}
    mode = step["config"]["norm_map"]["STATE"]
    assert mode == {"quantile": "QUANTILES", "mean_std": "MEAN_STD"}[kind]
    expected = stats.normalise_state(DEMOS)
    np.testing.assert_allclose(lerobot_normalise(DEMOS, numbers, mode), expected, atol=2e-3, rtol=2e-5)
    other = {"QUANTILES": "MEAN_STD", "MEAN_STD": "QUANTILES"}[mode]
    np.testing.assert_allclose(lerobot_normalise(DEMOS, numbers, other), expected, atol=2e-3, rtol=2e-5)
    read = ActionStats.load(tmp_path)
    np.testing.assert_allclose(read.normalise_state(DEMOS), expected, atol=1e-6)
    np.testing.assert_allclose(read.unnormalise(expected), stats.unnormalise(expected), atol=1e-5)


@KINDS
@FAMILIES
def test_openpi_normalises_as_training_did_and_its_folder_reads_back(kind, config, tmp_path):
    stats = stats_of(kind)
    write_openpi(config, stats, tmp_path)
    numbers = json.loads((tmp_path / "assets/cosmos_rl/norm_stats.json").read_text())["norm_stats"]
    expected = stats.normalise_state(DEMOS)
    demos = DEMOS.astype(np.float64)
    for quantiles in (False, True):
        found = openpi_normalise(demos, numbers["state"], quantiles=quantiles)
        np.testing.assert_allclose(found, expected, atol=1e-3, rtol=1e-5)
    read = ActionStats.beside(tmp_path, family=config.family)
    assert read.action.kind == ("mean_std" if config.family == "pi0" else "quantile")
    np.testing.assert_allclose(read.normalise_state(DEMOS), expected, atol=2e-3, rtol=1e-5)
    np.testing.assert_allclose(read.unnormalise(expected), stats.unnormalise(expected), atol=1e-5)


def test_measured_percentiles_come_back_to_the_bit(tmp_path):
    stats = ActionStats(action=Spread.of(DEMOS[:, :5]), state=None)
    write_lerobot(PUBLIC, stats, tmp_path)
    lerobot = ActionStats.load(tmp_path)
    (tmp_path / "openpi").mkdir()
    write_openpi(PUBLIC, stats, tmp_path / "openpi")
    for read in (lerobot, ActionStats.load(tmp_path / "openpi")):
        assert read.state is None
        np.testing.assert_array_equal(read.action.q01, stats.action.q01)
        np.testing.assert_array_equal(read.action.q99, stats.action.q99)


def test_statistics_of_several_data_sets_are_not_guessed_between(tmp_path):
    for name in ("a", "b/c"):
        (tmp_path / "assets" / name).mkdir(parents=True)
        (tmp_path / "assets" / name / "norm_stats.json").write_text("{}")
    with pytest.raises(UserError, match=r"stats to one of .*a/norm_stats.json, .*c/norm_stats.json"):
        ActionStats.beside(tmp_path)


def exported(config, stats, directory, *, format="lerobot", **held):
    config.save(directory)
    stats.save(directory)
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **held}))
    return export_pi(format, directory, [("action_in_proj.bias", torch.zeros(1))], cameras=())


def test_an_export_holds_the_format_alone(tmp_path):
    names = [name for name, _ in exported(PUBLIC, UNIT, tmp_path, dtype="bfloat16")]
    assert names == ["model.action_in_proj.bias", "model.paligemma_with_expert.gemma_expert.lm_head.weight"]
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "bfloat16"
    assert not (tmp_path / "action_stats.json").exists()


@pytest.mark.parametrize(
    ("format", "config", "held", "said"),
    [
        ("lerobot", PI05, {}, "differs in vocab_size, vision, language, expert"),
        ("lerobot", replace(PUBLIC, state="none", prompt="pi0"), {}, "reads the state as 'text'"),
        ("openpi", replace(PUBLIC, state="prefix"), {}, "reads the state as 'text'"),
        ("openpi", replace(PUBLIC, max_state_dim=8), {}, "one width for states and actions"),
        ("lerobot", PUBLIC, {"dtype": "float16"}, "--dtype float16"),
        ("openpi", PUBLIC, {"model_type": "cosmos_rl_mlp"}, "for pi0 and pi0.5"),
    ],
)
def test_what_a_format_cannot_express_is_refused(format, config, held, said, tmp_path):
    with pytest.raises(UserError, match=said):
        exported(config, UNIT, tmp_path, format=format, **held)


def test_openpi_has_a_pi05_that_reads_no_state(tmp_path):
    exported(replace(PUBLIC, state="none", prompt="pi0"), UNIT, tmp_path, format="openpi")
    assert json.loads((tmp_path / "config.json").read_text())["discrete_state_input"] is False


def test_a_gripper_that_is_turned_round_has_no_place_there(tmp_path):
    with pytest.raises(UserError, match="no step for the gripper"):
        exported(PUBLIC, replace(UNIT, gripper=Gripper(dim=-1, invert=True)), tmp_path)


def test_cameras_are_those_of_the_data_or_of_the_base(tmp_path):
    scratch = VLAModelConfig(action_dim=2, state_dim=2)
    demos = VLADataConfig(demos="gone", cameras=("observation.images.left",))
    assert camera_names(scratch, demos) == ("observation.images.left",)
    acting = {"simulator": "metaworld", "tasks": ("faucet-open",)}
    options = VLADataConfig(**acting, options={"cameras": ["corner2"]})
    assert camera_names(scratch, options) == ("observation.images.corner2",)
    write_lerobot(PUBLIC, UNIT, tmp_path, cameras=["observation.images.wrist"])
    assert camera_names(VLAModelConfig(path=str(tmp_path)), options) == ["observation.images.wrist"]
    assert camera_names(scratch, VLADataConfig(**acting)) == ()

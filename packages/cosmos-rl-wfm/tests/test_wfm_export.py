"""`cosmos-rl export` of a pipeline's folder: diffusers loads the whole of it, and samples as our engine does."""

import asyncio
import json

import numpy as np
import pytest
import torch
from wfm_fixtures import mock_data, prompt, recipe, save_pipeline

from cosmos_rl_core import run
from cosmos_rl_core.checkpoint.export import export
from cosmos_rl_core.errors import UserError
from cosmos_rl_wfm.build import build_engine
from cosmos_rl_wfm.engines.torch import ClipRequest, WFMTorchOptions
from cosmos_rl_wfm.models.config import WFMModelConfig
from cosmos_rl_wfm.samplers.sampler import sample_noise
from cosmos_rl_wfm.sampling import FlowSampling

pytestmark = pytest.mark.xdist_group("wfm_export")  # one process makes what they share

SIZE = {"frames": 5, "height": 32, "width": 32}
TEXT = {"length": 8}
CAPTION = "two discs & a red square"
ONE_STEP = FlowSampling(num_steps=1, rule="ode")


def trained(folder, run_dir, **model):
    """Three supervised steps from the pipeline in `folder`."""
    sections = {
        "run": {"domain": "wfm", "placement": "inline", "max_steps": 3, "output_dir": str(run_dir)},
        "model": {"path": str(folder), "text": TEXT, **model},
        "data": {"kind": "mock", "size": SIZE, "mock": {"rows": 2}, "cache_path": str(run_dir / "latents")},
        "algorithm": {"name": "sft"},
        "policy": {"prompts_per_step": 2, "optimizer": {"learning_rate": 2e-2}},
        "logging": {"sinks": ["jsonl"]},
    }
    run({name: section for name, section in recipe(**sections).items() if name not in ("rollout", "reward", "sync")})
    return str(run_dir)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """The folder of a pipeline, as diffusers wrote it."""
    folder = tmp_path_factory.mktemp("base")
    save_pipeline(folder)
    return folder


@pytest.fixture(scope="module")
def run_dir(base, tmp_path_factory):
    return trained(base, tmp_path_factory.mktemp("run"))


def load(folder):
    """The pipeline as a user loads it."""
    pytest.importorskip("accelerate", reason="what diffusers loads a Wan network with")
    from diffusers import DiffusionPipeline

    pipeline = DiffusionPipeline.from_pretrained(folder)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def rollout_of(folder):
    """The sample that our engine makes with the model of a folder in one Euler step."""
    data = mock_data(size=SIZE)
    engine = build_engine(WFMModelConfig(path=str(folder), text=TEXT), data=data, options=WFMTorchOptions())

    async def main():
        _, (rollout,) = await engine.generate(prompt(caption=CAPTION), num_samples=1, sampling=ONE_STEP, seed=5)
        await engine.close()
        return rollout

    return asyncio.run(main())


def sampled(pipeline, rollout, *, output_type="latent"):
    """What the pipeline of diffusers makes of the same noise and caption."""
    (seed,) = ClipRequest(prompt=prompt(), num_samples=1, sampling=ONE_STEP, seed=5).starts
    return pipeline(
        prompt=CAPTION,
        latents=sample_noise([seed], rollout.arrays["clean"].shape),
        num_inference_steps=1,
        guidance_scale=1.0,
        num_frames=SIZE["frames"],
        height=SIZE["height"],
        width=SIZE["width"],
        max_sequence_length=TEXT["length"],
        output_type=output_type,
        return_dict=False,
    )[0]


def weights_of(folder):
    from safetensors.torch import load_file

    return load_file(folder / "transformer" / "diffusion_pytorch_model.safetensors")


def test_diffusers_samples_from_the_exported_pipeline_as_our_engine_does(base, run_dir, tmp_path):
    export(run_dir, tmp_path / "out")
    pipeline, rollout = load(tmp_path / "out"), rollout_of(tmp_path / "out")
    clean = torch.from_numpy(rollout.arrays["clean"])[None]
    torch.testing.assert_close(sampled(pipeline, rollout), clean, atol=1e-5, rtol=1e-5)
    frames = np.rint(sampled(pipeline, rollout, output_type="np")[0] * 255).astype(int)
    assert np.abs(frames - rollout.media["video"]).max() <= 1  # what lies between two shades may be rounded either way
    before = torch.from_numpy(rollout_of(base).arrays["clean"])[None]
    assert not torch.allclose(before, clean, atol=1e-2), "training has changed nothing, so that equality says little"


def test_every_other_part_is_that_of_the_models_folder(base, run_dir, tmp_path):
    export(run_dir, tmp_path / "out")
    index = json.loads((tmp_path / "out" / "model_index.json").read_text())
    assert index == json.loads((base / "model_index.json").read_text())
    parts = ("vae", "scheduler", "text_encoder", "tokenizer")
    others = [file.relative_to(base) for part in parts for file in (base / part).iterdir()]
    assert len(others) > 2 * len(parts) - 2
    assert all((tmp_path / "out" / file).read_bytes() == (base / file).read_bytes() for file in others)
    assert not list((tmp_path / "out").glob("*.safetensors"))


def test_adapters_are_merged_into_the_pipeline_or_kept_apart_from_it(base, tmp_path):
    pytest.importorskip("peft", reason="an extra of the package")
    lora = trained(base, tmp_path / "run", lora={"rank": 2, "alpha": 4.0})
    export(lora, tmp_path / "merged")
    export(lora, tmp_path / "kept", merge_adapters=False)
    files = {file.name for file in (tmp_path / "kept").rglob("*.safetensors")}
    assert files == {"adapter_model.safetensors", "pytorch_lora_weights.safetensors"}
    before, merged = weights_of(base), weights_of(tmp_path / "merged")
    changed = {name for name, weight in before.items() if not torch.equal(weight, merged[name])}
    assert changed
    assert all(".attn" in name for name in changed)

    from peft import PeftModel

    pipeline = load(tmp_path / "merged")
    rollout = rollout_of(tmp_path / "merged")
    merged_sample = sampled(pipeline, rollout)
    beside = load(base)
    PeftModel.from_pretrained(beside.transformer, str(tmp_path / "kept"))  # puts its layers into the network
    torch.testing.assert_close(sampled(beside, rollout), merged_sample, atol=1e-5, rtol=1e-5)
    loaders = (
        lambda pipeline: pipeline.load_lora_weights(tmp_path / "kept"),
        lambda pipeline: pipeline.transformer.load_lora_adapter(tmp_path / "kept", use_safetensors=True),
    )
    for adapt in loaders:
        beside = load(base)
        assert not torch.allclose(sampled(beside, rollout), merged_sample, atol=1e-4)
        adapt(beside)
        torch.testing.assert_close(sampled(beside, rollout), merged_sample, atol=1e-5, rtol=1e-5)


def test_a_pipeline_that_is_no_longer_there_is_named_and_nothing_is_left(tmp_path):
    save_pipeline(tmp_path / "base")
    run_dir = trained(tmp_path / "base", tmp_path / "run")
    (tmp_path / "base").rename(tmp_path / "moved")
    with pytest.raises(UserError, match=r"base' is not a directory"):
        export(run_dir, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["moved", "run"]

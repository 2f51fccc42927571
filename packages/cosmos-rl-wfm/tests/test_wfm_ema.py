"""Runs with [model.ema]: going on bit for bit, what is exported and generated, and the average as the reference."""

import asyncio

import pytest
import torch
from safetensors.torch import load_file
from wfm_fixtures import lines_of, pixel_model, recipe

from cosmos_rl_core import run
from cosmos_rl_core.assemble import build_engine
from cosmos_rl_core.checkpoint.contents import AVERAGE, MODEL
from cosmos_rl_core.checkpoint.export import export
from cosmos_rl_core.checkpoint.reader import CheckpointReader
from cosmos_rl_core.inference.evaluate import evaluate
from cosmos_rl_core.inference.request import Request
from cosmos_rl_core.inference.worker import load_engine
from cosmos_rl_core.recipe.load import load_config, load_domain
from cosmos_rl_core.storage.folder import Folder

pytestmark = pytest.mark.xdist_group("wfm_ema")  # one process makes what they share

EMA = {"decay": 0.75, "reference": True}
RECIPE = recipe(
    model=pixel_model(ema=EMA).model_dump(mode="json", exclude_none=True),
    algorithm={"name": "flow_grpo", "kl_coef": 0.1},
    policy={"prompts_per_step": 2, "microbatch_terms": 6, "optimizer": {"learning_rate": 1e-2}},
    rollout={"group_size": 3, "sampling": {"num_steps": 4, "window": "fixed", "steps": [0, 2], "eval_num_steps": 3}},
)
ADAPTERS = {**RECIPE["model"], "lora": {"rank": 2}}


def trained(directory, *overrides, model=RECIPE["model"], **keys):
    """The metrics of a run's steps."""
    run({**RECIPE, "model": model}, [f"run.output_dir={directory}", *overrides], **keys)
    return lines_of(directory / "metrics.jsonl")


def saved(directory, step):
    """Every tensor of a checkpoint by name."""
    with CheckpointReader(Folder.at(directory / "checkpoints" / f"step_{step}")) as reader:
        return {name: reader.whole(name) for name in reader.contents.tensors}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Three steps without a stop, each saved."""
    directory = tmp_path_factory.mktemp("whole")
    steps = trained(directory, "checkpoint.every_steps=1", "checkpoint.keep=9")
    return directory, steps


def test_the_average_is_that_of_the_saved_weights(whole):
    held = saved(whole[0], 1)
    for step in (2, 3):
        now = saved(whole[0], step)
        for name in (name for name in now if name.startswith(MODEL + AVERAGE)):
            weight = now[MODEL + name.removeprefix(MODEL + AVERAGE)]
            torch.testing.assert_close(now[name], 0.75 * held[name] + 0.25 * weight, rtol=1e-5, atol=1e-7)
        held = now


@pytest.mark.parametrize("model", [RECIPE["model"], ADAPTERS], ids=["full", "adapters"])
def test_the_reference_is_the_average_of_the_steps_so_far(tmp_path, model):
    if "lora" in model:
        pytest.importorskip("peft", reason="an extra of the package")
    first, second, third = trained(tmp_path, model=model)
    assert first["kl"] == 0
    assert second["kl"] > 0
    assert third["kl"] > 0
    to_start = trained(tmp_path / "start", model={**model, "ema": {"decay": 0.75}})
    assert to_start[1]["kl"] > second["kl"]  # three quarters of the first step less far


def test_a_run_that_goes_on_is_the_one_that_never_stopped(whole, tmp_path):
    trained(tmp_path, "run.max_steps=2")
    steps = trained(tmp_path, resume="auto")
    assert [steps[-1][name] for name in ("loss", "kl", "grad_norm")] == [
        whole[1][-1][name] for name in ("loss", "kl", "grad_norm")
    ]
    expected, found = saved(whole[0], 3), saved(tmp_path, 3)
    assert expected.keys() == found.keys()
    assert any(AVERAGE in name for name in found)
    assert all(torch.equal(found[name], expected[name]) for name in found)


def test_the_average_is_exported_unless_the_trained_weights_are_asked_for(whole, tmp_path):
    tensors = saved(whole[0], 3)
    for averaged, prefix in ((True, MODEL + AVERAGE), (False, MODEL)):
        out = tmp_path / str(averaged)
        export(str(whole[0]), out, averaged=averaged)
        (file,) = out.glob("*.safetensors")
        exported = load_file(file)
        assert exported
        assert all(torch.equal(tensor, tensors[prefix + name]) for name, tensor in exported.items())


def test_the_files_of_one_process_are_a_network_of_diffusers(whole):
    pytest.importorskip("accelerate", reason="what diffusers loads a Wan network with")
    from diffusers import WanTransformer3DModel

    folder = whole[0] / "checkpoints" / "step_3" / "policy"
    network, loading = WanTransformer3DModel.from_pretrained(folder, output_loading_info=True)
    assert not any(loading.values())
    name, weight = next(iter(network.named_parameters()))
    assert torch.equal(weight, saved(whole[0], 3)[MODEL + name])


@pytest.mark.slow
def test_the_average_is_evaluated_unless_the_trained_weights_are_asked_for(whole, tmp_path):
    config = load_config({**RECIPE, "eval": {"data": RECIPE["data"]}})
    rewards = {}
    for averaged in (True, False):
        request = Request(checkpoint=str(whole[0]), out=tmp_path / str(averaged), averaged=averaged, media=False)
        rewards[averaged] = evaluate(config, request=request).metrics["reward"].mean
    assert rewards[True] != rewards[False]


def test_engines_sample_with_the_average_or_the_trained_weights(whole):
    config = load_config(RECIPE)
    engine = build_engine(config, load_domain("wfm"))
    tensors = saved(whole[0], 3)
    for averaged, prefix in ((True, MODEL + AVERAGE), (False, MODEL)):
        checkpoint = str(whole[0] / "checkpoints" / "step_3")
        asyncio.run(load_engine(config, engine, checkpoint, version=3, averaged=averaged))
        assert engine.weights()
        assert all(torch.equal(tensor, tensors[prefix + name]) for name, tensor in engine.weights().items())

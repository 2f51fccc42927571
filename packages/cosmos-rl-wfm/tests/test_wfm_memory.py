"""What `cosmos-rl plan` counts beside the network: encoders, autoencoder, averages, rollout replicas."""

import json
import shutil

import pytest
import torch
from wfm_fixtures import mock_data, pixel_model, recipe, save_pipeline, tiny_model

from cosmos_rl_core.parallel.offload.swap import tensors_of
from cosmos_rl_core.parallel.setup import ModelSetup
from cosmos_rl_core.plan.live_bytes import LiveBytes
from cosmos_rl_core.plan.memory import parse_bytes
from cosmos_rl_core.plan.needs import PREPARE
from cosmos_rl_core.plan.run_plan import plan
from cosmos_rl_core.recipe.load import load_config
from cosmos_rl_wfm.build import build_policy
from cosmos_rl_wfm.models.base import ClipSize
from cosmos_rl_wfm.models.build import build_model
from cosmos_rl_wfm.models.codec import clips_at_once, to_clips, to_video
from cosmos_rl_wfm.models.config import WFMModelConfig
from cosmos_rl_wfm.models.dry_run import CodecBytes, codec_bytes, network_bytes
from cosmos_rl_wfm.models.networks.tiny import tiny_network, tiny_vae
from cosmos_rl_wfm.sampling import FlowSampling

SIZE = {"frames": 5, "height": 32, "width": 32}
MEBI = 2**20


def bytes_of(module):
    return sum(tensor.nbytes for tensor in [*module.parameters(), *module.buffers()])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pipeline")
    save_pipeline(folder)
    return folder


def config_of(folder, *, model=None, algorithm=None, sampling=None, **sections):
    sampling = {"num_steps": 4, "eval_num_steps": 4, "window": "fixed", "steps": [0, 2], **(sampling or {})}
    return load_config(
        recipe(
            model={"path": str(folder), "text": {"length": 8, "cache_bytes": MEBI}, **(model or {})},
            data={"kind": "mock", "size": SIZE},
            algorithm={"name": "flow_grpo", "kl_coef": 0.0, **(algorithm or {})},
            rollout={"group_size": 3, "sampling": sampling, "options": {"samples_at_once": 2}},
            **sections,
        )
    )


def parts_of(config, *, rollout=False):
    planned = plan(config)
    assert planned.memory is not None
    needs = planned.memory.rollout if rollout else planned.memory.policy
    assert needs is not None
    return {part.name: part for part in needs.parts}


@pytest.mark.parametrize("tiling", [False, True])
@pytest.mark.parametrize("frames", [5, 29])
def test_an_autoencoder_takes_the_planned_memory(frames, tiling):
    """Peaks of the same code with and without values; of long clips the plan measures a few frames."""
    model = tiny_model(codec_tiling=tiling)
    vae = model.codec._vae  # pyright: ignore[reportAttributeAccessIssue]
    size = ClipSize(frames=frames, height=64, width=272)  # two tiles
    latents = model.latent_shape(size)
    clips = clips_at_once(frames * size.height * size.width)
    with torch.no_grad(), LiveBytes(without=tensors_of(vae)) as decoding:
        to_video(model.codec.decode(torch.zeros(clips, *latents)))
    with torch.no_grad(), LiveBytes(without=tensors_of(vae)) as encoding:
        model.codec.encode(to_clips(torch.zeros(clips, frames, size.height, size.width, 3, dtype=torch.uint8)))
    name, values = tiny_vae("wan")
    found = codec_bytes(name, values, dtype="float32", tiling=tiling, size=size, latents=latents)
    assert found == CodecBytes(weights=bytes_of(vae), encode=encoding.peak, decode=decoding.peak)


@pytest.mark.parametrize(("width", "differs"), [(256, False), (512, True)])
def test_frames_larger_than_a_tile_take_less_memory_in_tiles(width, differs):
    size = ClipSize(frames=5, height=64, width=width)
    videos, peaks = [], []
    for tiling in (False, True):
        model = tiny_model(codec_tiling=tiling)
        latents = torch.randn(1, *model.latent_shape(size), generator=torch.Generator().manual_seed(0))
        with torch.no_grad(), LiveBytes(without=tensors_of(model.codec._vae)) as held:  # pyright: ignore
            videos.append(to_video(model.codec.decode(latents)))
        peaks.append(held.peak)
    assert (peaks[1] < peaks[0]) == differs
    assert videos[0].shape == videos[1].shape
    assert torch.equal(*videos) != differs


def test_clips_without_memory_take_what_real_ones_do():
    """Peaks of the same code with and without values; a pass over more layers keeps no more."""
    model = tiny_model()
    vae = model.codec._vae  # pyright: ignore[reportAttributeAccessIssue]
    size = ClipSize(frames=5, height=32, width=32)
    latents = model.latent_shape(size)
    with torch.no_grad(), LiveBytes(without=tensors_of(vae)) as held:
        to_video(model.codec.decode(torch.zeros(clips_at_once(5 * 32 * 32), *latents)))
    name, values = tiny_vae("wan")
    found = codec_bytes(name, values, dtype="float32", tiling=False, size=size, latents=latents)
    assert found.decode == held.peak
    assert found.weights == bytes_of(vae)
    assert found.encode > 5 * 32 * 32 * 3 * 4
    peaks = {
        network_bytes(
            "WanTransformer3DModel",
            {**tiny_network("wan"), "num_layers": layers},
            dtype="float32",
            latents=latents,
            samples=2,
            captions=2,
            text_length=8,
        )
        for layers in (1, 4)
    }
    assert len(peaks) == 1


def test_a_rollout_replica_holds_encoder_and_autoencoder_and_decodes(folder):
    parts = parts_of(config_of(folder, model={"dtype": "bfloat16"}), rollout=True)
    built = build_model(WFMModelConfig(path=str(folder), dtype="bfloat16"), parts=("network", "codec", "text"))
    kept = parts["parameters kept in float32"].bytes or 0
    assert kept > 0 and (parts["weights"].bytes or 0) + kept == sum(
        parameter.nbytes for parameter in built.network.parameters()
    )
    assert parts["text encoder"].bytes == bytes_of(built.captions._encoder)  # pyright: ignore
    assert parts["autoencoder"].bytes == bytes_of(built.codec._vae)  # pyright: ignore
    assert parts["cached captions"].bytes == MEBI and parts["cached captions"].host
    for work in ("a caption's embedding", "states of the samples", "a forward pass", "decoding of clips"):
        assert (parts[work].bytes or 0) > 0 and parts[work].at


def test_encoders_are_on_the_policy_where_it_reads_real_clips(folder):
    plain = parts_of(config_of(folder))
    assert not {"text encoder", "autoencoder", "encoding of clips"} & set(plain)
    anchored = parts_of(
        config_of(folder, algorithm={"name": "ddrl"}, data_regularization={"coef": 0.1, "rows_per_step": 2})
    )
    assert {"text encoder", "autoencoder", "encoding of clips", "cached captions"} <= set(anchored)
    written = config_of(folder).model_dump(mode="json", exclude_none=True)
    kept = {name: written[name] for name in ("run", "model", "data", "policy")}
    supervised = plan(load_config({**kept, "algorithm": {"name": "sft"}})).memory
    assert supervised is not None and supervised.rollout is None
    assert {"text encoder", "autoencoder"} <= {part.name for part in supervised.policy.parts}
    guided = parts_of(config_of(folder, sampling={"guidance": 3.0}))
    assert guided["text encoder"].at == (PREPARE,)
    network, policy = "network, loaded before", "policy, while its reference is built"
    assert guided[network].at == (PREPARE,) and guided[network].bytes == guided["parameters"].bytes
    pulled = parts_of(config_of(folder, sampling={"guidance": 3.0}, algorithm={"kl_coef": 0.1}))
    assert pulled[network].bytes == pulled["reference of the KL term"].bytes
    assert policy not in guided and pulled[policy].bytes == pulled["parameters"].bytes


def test_an_offloaded_encoder_is_on_the_device_only_while_captions_are_embedded(folder):
    text = {"length": 8, "cache_bytes": MEBI}
    plain = parts_of(config_of(folder), rollout=True)["text encoder"]
    parts = parts_of(config_of(folder, model={"text": {**text, "offload": True}}), rollout=True)
    encoder, host = parts["text encoder"], parts["text encoder, offloaded"]
    assert (plain.at, encoder.at, host.at) == ((), ("captions are embedded",), ())
    assert encoder.bytes == host.bytes == plain.bytes and host.host and not encoder.host
    guided = parts_of(config_of(folder, model={"text": {**text, "offload": True}}, sampling={"guidance": 3.0}))
    assert guided["text encoder"].at == (PREPARE,) and "text encoder, offloaded" not in guided


def test_averages_and_old_weights_are_float32_copies_of_what_is_trained(folder):
    precision = {"prompts_per_step": 2, "precision": {"parameters": "bfloat16"}}
    config = config_of(
        folder, model={"ema": {"decay": 0.9, "reference": True}}, algorithm={"kl_coef": 0.1}, policy=precision
    )
    parts = parts_of(config)
    policy = build_policy(config.model, data=config.data, sampling=FlowSampling(), seed=0, setup=ModelSetup())
    trained = sum(parameter.numel() for parameter in policy.module.parameters())
    assert parts["average of the weights"].bytes == parts["weights that sample the rollouts"].bytes == 4 * trained
    assert parts["trained weights, set aside"].bytes == 2 * trained
    assert "reference of the KL term" not in parts


def test_a_kl_term_towards_the_start_holds_a_second_network(folder):
    parts = parts_of(config_of(folder, algorithm={"kl_coef": 0.1}))
    assert parts["reference of the KL term"].bytes == parts["parameters"].bytes


def test_config_json_alone_is_enough_for_encoders_and_autoencoder(folder, tmp_path):
    bare = tmp_path / "bare"
    shutil.copytree(folder, bare, ignore=shutil.ignore_patterns("*.safetensors"))
    found, expected = (plan(config_of(path), memory=parse_bytes("80GiB")).memory for path in (bare, folder))
    assert found is not None and expected is not None and expected.rollout is not None
    assert (found.policy, found.rollout) == (expected.policy, expected.rollout)
    assert {"text encoder", "autoencoder"} <= {part.name for part in expected.rollout.parts if part.bytes}
    assert found.fits is True


def test_an_encoder_of_unknown_size_is_named_and_nothing_is_said_to_fit(folder, tmp_path):
    bare = tmp_path / "bare"
    shutil.copytree(folder, bare)
    for file in [*(bare / "text_encoder").glob("*.safetensors"), bare / "text_encoder" / "config.json"]:
        file.unlink()
    planned = plan(config_of(bare), memory=parse_bytes("80GiB"))
    assert planned.memory is not None and planned.memory.fits is None
    assert planned.memory.unknown == ("a rollout replica: text encoder",)
    assert "not known before the run:\n  a rollout replica: text encoder" in str(planned)
    assert json.loads(json.dumps(planned.as_json()))["memory"]["unknown"] == ["a rollout replica: text encoder"]


def test_a_model_of_pixels_and_words_has_no_parts_but_its_own():
    data = mock_data().model_dump(mode="json", exclude_none=True)
    network = {**tiny_network("wan", codec="pixels"), "cross_attn_norm": True}
    model = pixel_model(network=network).model_dump(mode="json", exclude_none=True)
    parts = parts_of(load_config(recipe(model=model, data=data)), rollout=True)
    assert "text encoder" not in parts and parts["autoencoder"].bytes == 0

"""Models in diffusers folders: loaded by parts, as diffusers writes and loads them, refused with a reason."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from wfm_fixtures import FAMILIES, save_pipeline

from cosmos_rl_core.errors import UserError
from cosmos_rl_wfm.models.base import ClipSize
from cosmos_rl_wfm.models.build import build_model, fill_network, load_parts
from cosmos_rl_wfm.models.config import TextSection, WFMLoraSection, WFMModelConfig
from cosmos_rl_wfm.models.folder import open_folder
from cosmos_rl_wfm.models.networks.tiny import tiny_network
from cosmos_rl_wfm.models.weights import empty_network, random_network
from doubles import ranks

ranks.preload("diffusers.models.transformers.transformer_wan", "cosmos_rl_wfm.models.build")

WORDS = TextSection(encoder="words")
CLIP = ClipSize(frames=5, height=32, width=32)


def config(path, **keys):
    return WFMModelConfig(path=str(path), text=WORDS, **keys)


def build(path, *, parts=("network", "codec", "text"), **keys):
    return build_model(config(path, **keys), parts=parts)


def pixel_network(directory):
    """A tiny network of pixels in a folder of its own."""
    built = build_model(WFMModelConfig(family="wan", tiny=True, codec="pixels", text=WORDS))
    built.network.save_pretrained(directory)
    return built


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    assert not [name for name in found if not torch.equal(found[name], expected[name])]


def test_a_pipeline_is_loaded_by_parts(tmp_path):
    whole = save_pipeline(tmp_path)
    built = build(tmp_path)
    assert_same(built.network.state_dict(), whole.transformer.state_dict())
    assert built.latent_shape(CLIP) == (16, 2, 4, 4)
    assert built.traits.shift == 3.0
    assert not built.network.training


def test_a_trainer_of_cached_latents_needs_no_other_weights(tmp_path):
    save_pipeline(tmp_path)
    (tmp_path / "vae" / "diffusion_pytorch_model.safetensors").unlink()
    built = build(tmp_path, parts=("network",))
    assert built.codec is None
    assert built.latent_shape(CLIP) == (16, 2, 4, 4)  # by its configuration
    with pytest.raises(UserError, match="vae has no safetensors"):
        build(tmp_path)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_network_that_diffusers_wrote_is_read_exactly(tmp_path, family):
    written = build_model(WFMModelConfig(family=family, tiny=True, codec="pixels", text=WORDS))
    written.network.save_pretrained(tmp_path)
    assert_same(build(tmp_path, codec="pixels", parts=("network",)).weights(), written.weights())


def test_loading_in_bfloat16_is_that_of_diffusers(tmp_path):
    pytest.importorskip("accelerate", reason="what diffusers loads a Wan network with")
    from diffusers import WanTransformer3DModel

    pixel_network(tmp_path)
    expected = WanTransformer3DModel.from_pretrained(tmp_path, torch_dtype=torch.bfloat16)
    found = build(tmp_path, codec="pixels", dtype="bfloat16").network.state_dict()
    assert {name: tensor.dtype for name, tensor in found.items()} == {
        name: tensor.dtype for name, tensor in expected.state_dict().items()
    }
    assert_same(found, expected.state_dict())


def test_sharded_files_are_read_by_their_index(tmp_path):
    built = pixel_network(tmp_path)
    weights = load_file(tmp_path / "diffusion_pytorch_model.safetensors")
    (tmp_path / "diffusion_pytorch_model.safetensors").unlink()
    names = sorted(weights)
    halves = {"one.safetensors": names[: len(names) // 2], "two.safetensors": names[len(names) // 2 :]}
    for file, keys in halves.items():
        save_file({key: weights[key] for key in keys}, tmp_path / file)
    index = {"metadata": {}, "weight_map": {key: file for file, keys in halves.items() for key in keys}}
    (tmp_path / "diffusion_pytorch_model.safetensors.index.json").write_text(json.dumps(index))
    assert_same(build(tmp_path, codec="pixels").weights(), built.weights())


def test_what_lies_beside_a_checkpoint_and_its_weights_load_the_model(tmp_path):
    save_pipeline(tmp_path / "a")
    built = build(tmp_path / "a", parts=("network",))
    built.save(tmp_path / "b")
    assert not list((tmp_path / "b").rglob("*.safetensors"))
    save_file(built.weights(), tmp_path / "b" / "model.safetensors")  # as core's checkpoints call it
    assert_same(build(tmp_path / "b", parts=("network", "text")).weights(), built.weights())


def test_empty_networks_have_what_they_compute_themselves():
    expected = random_network("WanTransformer3DModel", tiny_network("wan"), dtype=torch.float32, seed=0)
    empty = empty_network("WanTransformer3DModel", tiny_network("wan"), dtype=torch.float32)
    assert torch.equal(empty.rope.freqs_cos, expected.rope.freqs_cos)


def test_a_network_is_filled_after_it_was_cut(tmp_path):
    pixel_network(tmp_path)
    ranks.run_ranks(fill_a_sharded_network, 2, path=str(tmp_path))


def fill_a_sharded_network(rank, world_size, path):
    from torch.distributed.fsdp import fully_shard

    whole = build(path, codec="pixels", parts=("network",)).network.state_dict()
    built = build_model(config(path, codec="pixels"), parts=("network",), filled=False)
    fully_shard(built.network)
    assert all(parameter.is_meta for parameter in built.network.parameters())
    fill_network(built, config(path, codec="pixels"), device=torch.device("cpu"))
    assert_same({name: tensor.full_tensor() for name, tensor in built.network.state_dict().items()}, whole)


def test_codec_and_captions_can_come_later(tmp_path):
    save_pipeline(tmp_path)
    built = build(tmp_path, parts=("network",))
    load_parts(built, config(tmp_path), {"codec", "text"})
    assert built.codec is not None and built.captions is not None
    clip = torch.arange(256, dtype=torch.uint8).repeat(60).view(1, 5, 32, 32, 3)
    assert torch.equal(built.encode(clip), build(tmp_path).encode(clip))


# ---- bad input


def test_a_path_that_is_not_there_is_named():
    with pytest.raises(UserError, match="is not a directory; give one that diffusers' save_pretrained wrote"):
        build("./nowhere")


def test_a_folder_of_something_else_is_refused(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    with pytest.raises(UserError, match=r"neither model_index.json nor a config.json with _class_name"):
        build(tmp_path)


def test_a_damaged_configuration_is_named(tmp_path):
    (tmp_path / "model_index.json").write_text("{")
    with pytest.raises(UserError, match=r"model_index.json: not valid JSON"):
        build(tmp_path)


def test_pickled_weights_are_not_read(tmp_path):
    pixel_network(tmp_path)
    (tmp_path / "diffusion_pytorch_model.safetensors").rename(tmp_path / "diffusion_pytorch_model.bin")
    with pytest.raises(UserError, match="only that format is read"):
        build(tmp_path, codec="pixels")


def test_damaged_weights_are_named(tmp_path):
    pixel_network(tmp_path)
    (tmp_path / "diffusion_pytorch_model.safetensors").write_bytes(b"12345678")
    with pytest.raises(UserError, match="is not a safetensors file"):
        build(tmp_path, codec="pixels")


def test_missing_and_misshapen_weights_are_named(tmp_path):
    pixel_network(tmp_path)
    file = tmp_path / "diffusion_pytorch_model.safetensors"
    weights = load_file(file)
    save_file({**weights, "proj_out.bias": torch.zeros(5)}, file)
    with pytest.raises(UserError, match=r"proj_out.bias is \[5\] in the safetensors and \[12\] by config.json"):
        build(tmp_path, codec="pixels")
    del weights["proj_out.bias"]
    save_file(weights, file)
    with pytest.raises(UserError, match=r"lacks 1 weights of WanTransformer3DModel \(proj_out.bias\)"):
        build(tmp_path, codec="pixels")


def test_a_network_alone_has_no_autoencoder_and_no_encoder(tmp_path):
    pixel_network(tmp_path)
    with pytest.raises(UserError, match='set codec = "pixels"'):
        build(tmp_path)
    asked = WFMModelConfig(path=str(tmp_path), codec="pixels")
    with pytest.raises(UserError, match="no text_encoder"):
        build_model(asked, parts=("text",))


def test_another_family_than_the_folders_is_refused(tmp_path):
    pixel_network(tmp_path)
    with pytest.raises(UserError, match=r'model.family = "cosmos", but .* has a WanTransformer3DModel, of "wan"'):
        build(tmp_path, family="cosmos", codec="pixels")


def test_two_networks_are_refused(tmp_path):
    save_pipeline(tmp_path)
    index = json.loads((tmp_path / "model_index.json").read_text())
    index["transformer_2"] = ["diffusers", "WanTransformer3DModel"]
    (tmp_path / "model_index.json").write_text(json.dumps(index))
    with pytest.raises(UserError, match=r"Wan2\.2"):
        build(tmp_path)


def test_an_autoencoder_of_other_channels_is_refused(tmp_path):
    save_pipeline(tmp_path)
    settings = json.loads((tmp_path / "vae" / "config.json").read_text())
    (tmp_path / "vae" / "config.json").write_text(json.dumps({**settings, "z_dim": 8}))
    with pytest.raises(UserError, match="takes 16 channels and its autoencoder makes 8"):
        build(tmp_path)


def test_a_revision_of_a_directory_is_refused(tmp_path):
    pixel_network(tmp_path)
    with pytest.raises(UserError, match="revision is for a model id"):
        build(tmp_path, revision="main")


def test_several_sets_of_weights_are_refused(tmp_path):
    pixel_network(tmp_path)
    file = tmp_path / "diffusion_pytorch_model.safetensors"
    for name in ("a.safetensors", "b.safetensors"):
        (tmp_path / name).write_bytes(file.read_bytes())
    file.unlink()
    with pytest.raises(UserError, match=r"several sets of weights \(a.safetensors, b.safetensors\)"):
        open_folder(str(tmp_path)).weights("transformer")


def test_adapters_alone_are_no_model(tmp_path):
    pytest.importorskip("peft", reason="an extra of the package")
    built = build_model(WFMModelConfig(family="wan", tiny=True, codec="pixels", text=WORDS, lora=WFMLoraSection()))
    built.save(tmp_path)
    with pytest.raises(UserError, match="contains adapters of another model"):
        build(tmp_path, codec="pixels")


def test_a_variant_of_the_weights_is_not_taken_for_them(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"_class_name": "WanTransformer3DModel"}))
    for variant in ("", ".fp16"):
        index = tmp_path / f"diffusion_pytorch_model{variant}.safetensors.index.json"
        index.write_text(json.dumps({"weight_map": {"a": f"part{variant}.safetensors"}}))
    (tmp_path / "._part.safetensors").write_bytes(b"of macOS")
    assert [file.name for file in open_folder(str(tmp_path)).weights("transformer")] == ["part.safetensors"]

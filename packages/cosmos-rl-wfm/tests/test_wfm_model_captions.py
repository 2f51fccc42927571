"""Caption encoders: each embeds as the encode_prompt of its own pipeline, at tiny random sizes."""

import asyncio
import importlib

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from wfm_fixtures import VOCABULARY, save_pipeline, tiny_t5, tiny_tokenizer

from cosmos_rl_core.errors import UserError
from cosmos_rl_core.parallel.offload.swap import tensors_of
from cosmos_rl_core.types import Prompt
from cosmos_rl_wfm.build import build_engine
from cosmos_rl_wfm.data.config import WFMDataConfig
from cosmos_rl_wfm.engines.torch import WFMTorchOptions
from cosmos_rl_wfm.models.build import build_model
from cosmos_rl_wfm.models.captions import ImageEncoder, load_captions
from cosmos_rl_wfm.models.config import TextSection, WFMModelConfig
from cosmos_rl_wfm.models.folder import ModelFolder
from cosmos_rl_wfm.models.networks.families import make_family
from cosmos_rl_wfm.models.networks.tiny import tiny_network, tiny_vae
from cosmos_rl_wfm.models.weights import random_network
from cosmos_rl_wfm.sampling import FlowSampling
from doubles.pretend_cuda import pretend_cuda

CAPTIONS = ["a red  square moves", "two discs &amp; a cross"]
DATA = WFMDataConfig.model_validate({"kind": "mock", "size": {"frames": 5, "height": 32, "width": 32}})
CHAT = "{% for m in messages %}{{ m['role'] }} : {{ m['content'][0]['text'] }} {% endfor %}"


class Unguarded:
    """In place of the gated safety checker."""


def tokenizer(*, length=8):
    made = tiny_tokenizer(length=length)
    made.chat_template = CHAT
    return made


def folder(root, **parts):
    """A pipeline's folder with these parts alone."""
    classes = {}
    for name, part in parts.items():
        part.save_pretrained(root / name)
        classes[name] = ("transformers", type(part).__name__)
    return ModelFolder(root=root, classes=classes, is_pipeline=True)


def load(there, *, length=8, instruction="", **given):
    device = torch.device("cpu")
    return load_captions(there, dtype=torch.float32, device=device, length=length, instruction=instruction, **given)


def test_wan_captions_are_those_of_its_pipeline(tmp_path):
    from diffusers import WanPipeline

    parts = {"tokenizer": tokenizer(), "text_encoder": tiny_t5("UMT5EncoderModel")}
    pipeline = WanPipeline(**parts, vae=None, scheduler=None, transformer=None)
    expected, blank = pipeline.encode_prompt(CAPTIONS, negative_prompt="", max_sequence_length=8)
    encode = load(folder(tmp_path, **parts))
    found = encode(CAPTIONS)
    torch.testing.assert_close(found.text, expected)
    assert found.text_mask.sum(dim=1).tolist() == [5, 6]
    torch.testing.assert_close(encode([""]).text, blank[:1])


def test_cosmos_captions_are_those_of_its_pipeline(tmp_path):
    from diffusers import Cosmos2_5_PredictBasePipeline
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    text = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "vocab_size": len(VOCABULARY),
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]},
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 1,
    }
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 16}
    torch.manual_seed(0)
    encoder = Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig(text_config=text, vision_config=vision)).eval()
    parts = {"tokenizer": tokenizer(length=24), "text_encoder": encoder}
    vae = random_network(*tiny_vae("cosmos"), dtype=torch.float32, seed=0)
    others = {"transformer": None, "vae": vae, "scheduler": None, "safety_checker": Unguarded()}
    pipeline = Cosmos2_5_PredictBasePipeline(**parts, **others)
    with torch.no_grad():
        expected = pipeline._get_prompt_embeds(CAPTIONS, max_sequence_length=24)
    found = load(folder(tmp_path, **parts), length=24)(CAPTIONS)
    assert found.text.shape == (2, 24, 3 * 16)
    torch.testing.assert_close(found.text, expected)
    assert found.text_mask.all()


def test_stable_diffusion_3_captions_are_those_of_its_pipeline(tmp_path):
    from diffusers import StableDiffusion3Pipeline
    from transformers import CLIPTextConfig, CLIPTextModelWithProjection

    def clip(seed):
        torch.manual_seed(seed)
        sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}
        ids = {"vocab_size": len(VOCABULARY), "eos_token_id": 1, "pad_token_id": 0, "bos_token_id": 0}
        config = CLIPTextConfig(**sizes, **ids, projection_dim=6, max_position_embeddings=8)
        return CLIPTextModelWithProjection(config).eval()

    parts = {
        "tokenizer": tokenizer(),
        "tokenizer_2": tokenizer(),
        "tokenizer_3": tokenizer(),
        "text_encoder": clip(0),
        "text_encoder_2": clip(1),
        "text_encoder_3": tiny_t5("T5EncoderModel"),
    }
    pipeline = StableDiffusion3Pipeline(**parts, transformer=None, vae=None, scheduler=None)
    with torch.no_grad():
        expected = pipeline.encode_prompt(
            CAPTIONS, None, None, device=torch.device("cpu"), do_classifier_free_guidance=False, max_sequence_length=8
        )
    found = load(folder(tmp_path, **parts))(CAPTIONS)
    torch.testing.assert_close(found.text, expected[0])
    torch.testing.assert_close(found.pooled, expected[2])


def test_the_default_negative_prompt_of_cosmos_is_that_of_its_pipeline():
    from diffusers.pipelines.cosmos.pipeline_cosmos2_5_predict import DEFAULT_NEGATIVE_PROMPT

    assert make_family("CosmosTransformer3DModel", tiny_network("cosmos")).negative_prompt() == DEFAULT_NEGATIVE_PROMPT
    assert make_family("WanTransformer3DModel", tiny_network("wan")).negative_prompt() == ""


@pytest.mark.parametrize("instruction", ["", "draw :"])
def test_sana_captions_are_those_of_its_pipeline(tmp_path, instruction):
    from diffusers import SanaPipeline
    from transformers import Gemma2Config, Gemma2Model

    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    ids = {"vocab_size": len(VOCABULARY), "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1}
    torch.manual_seed(0)
    encoder = Gemma2Model(Gemma2Config(**sizes, **ids, num_key_value_heads=1, head_dim=8)).eval()
    parts = {"tokenizer": tokenizer(), "text_encoder": encoder}
    pipeline = SanaPipeline(**parts, vae=None, transformer=None, scheduler=None)
    device = torch.device("cpu")
    with torch.no_grad():
        expected = pipeline.encode_prompt(
            CAPTIONS,
            negative_prompt=["", "two discs"],
            device=device,
            max_sequence_length=8,
            complex_human_instruction=[instruction] if instruction else None,
        )
    encode = load(folder(tmp_path, **parts), instruction=instruction, negative_prompt="two discs")
    found, negative = encode(CAPTIONS), encode(["", "two discs"])
    torch.testing.assert_close(found.text, expected[0])
    assert torch.equal(found.text_mask, expected[1].bool())
    torch.testing.assert_close(negative.text, expected[2])


def test_an_encoder_that_is_not_supported_is_named(tmp_path):
    from transformers import BertConfig, BertModel

    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}
    there = folder(tmp_path, tokenizer=tokenizer(), text_encoder=BertModel(BertConfig(vocab_size=16, **sizes)))
    with pytest.raises(UserError, match=r"text encoder BertModel is not supported .*text.encoder = \"cached\""):
        load(there)


def test_an_encoder_without_its_tokenizer_is_named(tmp_path):
    with pytest.raises(UserError, match="has no tokenizer; it has text_encoder"):
        load(folder(tmp_path, text_encoder=tiny_t5("UMT5EncoderModel")))


@torch.no_grad()
def test_the_first_frame_is_embedded_as_by_the_pipeline_of_wan(tmp_path):
    from diffusers import WanImageToVideoPipeline
    from PIL import Image
    from transformers import CLIPImageProcessor, CLIPVisionConfig, CLIPVisionModel

    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 3, "num_attention_heads": 2}
    torch.manual_seed(0)
    encoder = CLIPVisionModel(CLIPVisionConfig(**sizes, image_size=16, patch_size=8)).eval()
    square = {"height": 16, "width": 16}
    processor = CLIPImageProcessor(size={"shortest_edge": 16}, crop_size=square)
    parts = {"image_encoder": encoder, "image_processor": processor}
    others = dict.fromkeys(["tokenizer", "text_encoder", "vae", "scheduler", "transformer"])
    pipeline = WanImageToVideoPipeline(**parts, **others)
    pixels = torch.arange(2 * 24 * 32 * 3).remainder(256).to(torch.uint8).view(2, 24, 32, 3)
    expected = pipeline.encode_image([Image.fromarray(image.numpy()) for image in pixels], torch.device("cpu"))
    encode = ImageEncoder(folder(tmp_path, **parts), dtype=torch.float32, device=torch.device("cpu"))
    found = encode(pixels)
    assert found.shape == (2, 5, 8)
    torch.testing.assert_close(found, expected)


def pipeline_config(folder, *, offload):
    return WFMModelConfig.model_validate({"path": str(folder), "text": {"offload": offload}})


def test_an_offloaded_encoder_embeds_the_same_and_keeps_its_ties(tmp_path):
    save_pipeline(tmp_path)
    plain, offloaded = (
        build_model(pipeline_config(tmp_path, offload=offload), parts=("text",)) for offload in (False, True)
    )
    for name, tensor in plain.encode_text(CAPTIONS).tensors().items():
        assert torch.equal(tensor, offloaded.encode_text(CAPTIONS).tensors()[name])
    [encoder] = offloaded.captions.modules
    assert encoder.shared.weight is encoder.encoder.embed_tokens.weight


@pytest.mark.cuda_dry
def test_an_offloaded_encoder_is_on_the_gpu_only_while_a_caption_is_embedded(tmp_path):
    save_pipeline(tmp_path)
    for module in ("cosmos_rl_wfm.build", "diffusers.models.transformers.transformer_wan"):
        importlib.import_module(module)
    sampling = FlowSampling.model_validate({"num_steps": 2, "guidance": 4.0, "window": "fixed", "steps": [0]})

    async def go(offload):
        config, options = pipeline_config(tmp_path, offload=offload), WFMTorchOptions()
        engine = await asyncio.to_thread(build_engine, config, data=DATA, options=options)
        [encoder] = engine._model.captions.modules
        during = []
        encoder.register_forward_hook(lambda module, *_: during.append({t.is_cuda for t in tensors_of(module)}))
        answers, between = [], []
        try:
            await engine.switch(1, lambda: None)
            for caption in ("a red square moves", "two discs cross", "a red square moves"):
                prompt = Prompt(sample_id=0, row={"caption": caption})
                answers += (await engine.generate(prompt, num_samples=2, sampling=sampling, seed=1))[1]
                between.append({tensor.is_cuda for tensor in tensors_of(encoder)})
        finally:
            await engine.close()
        return answers, during, between

    with pretend_cuda() as record:
        plain, _, _ = asyncio.run(go(offload=False))
        answers, during, between = asyncio.run(go(offload=True))
    assert not record.mismatches, record
    assert during == [{True}] * 3  # the negative prompt and two captions: the third one is cached
    assert between == [{False}] * 3
    for one, other in zip(plain, answers, strict=True):
        assert all(np.array_equal(one.arrays[name], other.arrays[name]) for name in other.arrays)


@pytest.mark.parametrize("encoder", ["words", "cached"])
def test_only_an_encoder_with_weights_can_be_offloaded(encoder):
    with pytest.raises(ValidationError, match=f'encoder = "{encoder}" has no weights to offload: remove offload'):
        TextSection(encoder=encoder, offload=True)

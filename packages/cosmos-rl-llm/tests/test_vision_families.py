"""Families of vision-language models: expansions, files of the processing, and the check of a model before training."""

import json
from importlib import import_module
from types import SimpleNamespace

import numpy as np
import pytest
from transformers import (
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoConfig,
    AutoImageProcessor,
    PreTrainedTokenizerFast,
)
from transformers.models.gemma3.processing_gemma3 import Gemma3Processor

from cosmos_rl_core.errors import MediaError, UserError
from cosmos_rl_core.parallel.setup import ModelSetup
from cosmos_rl_llm.config import LLMDataConfig, LLMModelConfig
from cosmos_rl_llm.domain import LLM
from cosmos_rl_llm.media.item import expand_spans, view_of
from cosmos_rl_llm.media.source import Video
from cosmos_rl_llm.media.tiles import in_words
from cosmos_rl_llm.media.vision import FAMILIES, find_family
from cosmos_rl_llm.model.miniature import shrink
from cosmos_rl_llm.policy.probe import compare, family_miniature
from cosmos_rl_llm.tiny import write_tiny_model

pytest.importorskip("PIL")

from PIL import Image
from tiny_vision import (
    NAMES,
    PROCESSING,
    WITH_VIDEOS,
    WORDS,
    family_of,
    make,
    picture,
    video,
    write_processing,
)

ROPE = {"rope_type": "default", "mrope_section": [16, 24, 24], "rope_theta": 1e6}
PUBLISHED = {
    "qwen2_vl": ROPE,
    "qwen2_5_vl": ROPE,
    "qwen3_vl": {**ROPE, "mrope_section": [24, 20, 20], "mrope_interleaved": True},
    "qwen3_vl_moe": {**ROPE, "mrope_section": [24, 20, 20], "mrope_interleaved": True},
}
"""Rotary embeddings of published checkpoints, which the defaults of transformers' configurations lack."""


def config_of(name, **values):
    """The family's configuration at its published sizes."""
    return AutoConfig.for_model(name, **values)


def processor_class(name):
    kind = name.removesuffix("_moe")
    module = import_module(f"transformers.models.{kind}.processing_{kind}")
    return next(v for k, v in vars(module).items() if k.endswith("Processor") and v.__module__ == module.__name__)


@pytest.mark.parametrize("size", [(16, 16), (32, 40), (90, 33)], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_a_placeholder_expands_as_in_transformers(name, size, tmp_path):
    model = make(name)
    family = family_of(model, tmp_path)
    shown, kind = picture(*size, seed=0), processor_class(name)
    item = family.image(shown)
    newer = getattr(kind, "images_kwargs", None)  # of transformers 5.24
    given = kind.valid_processor_kwargs._defaults.get("images_kwargs", {}) if newer is None else newer
    image_processor = AutoImageProcessor.from_pretrained(tmp_path, backend="pil")
    features = image_processor(shown, return_tensors="np", **given)
    processor = SimpleNamespace(
        image_processor=image_processor,
        image_token=WORDS[model.config.image_token_id],
        image_seq_len=4,
        image_seq_length=4,
        fake_image_token="<fake_token_around_image>",
        global_image_tag="<global-img>",
        global_image_token="<global-img>",
        start_image_token="<img>",
        end_image_token="</img>",
        full_image_sequence=f"\n\n<start_of_image>{'<image_soft_token>' * 4}<end_of_image>\n\n",
        patch_size=4,
        num_additional_image_tokens=1,
        vision_feature_select_strategy="default",
    )
    wanted = kind.replace_image_token(processor, features, 0)
    assert family.expansion(item) == wanted
    assert family.num_tokens(item) == wanted.count(processor.image_token)
    pixels = features["pixel_values"]
    np.testing.assert_array_equal(item.pixels, pixels[0] if name in ("idefics3", "smolvlm") else pixels)


@pytest.mark.parametrize("size", [(16, 16), (90, 33)], ids=str)
def test_gemma_3_is_processed_as_by_its_own_processor(size, tmp_path):
    family = family_of(make("gemma3"), tmp_path)
    signs = {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"}
    tokenizer = PreTrainedTokenizerFast.from_pretrained(tmp_path, extra_special_tokens=signs)
    processor = Gemma3Processor(family.image_processor, tokenizer, image_seq_length=4)
    shown = [picture(*size, seed=seed) for seed in range(2)]
    text = "<user> <start_of_image> <start_of_image> what colour ? <bot> "
    wanted = processor(images=shown, text=text, return_tensors="np", add_special_tokens=False)
    items = [family.image(each) for each in shown]
    tokens = np.asarray(tokenizer(*expand_spans([text], items, family), add_special_tokens=False)["input_ids"])
    np.testing.assert_array_equal(tokens, wanted["input_ids"][0])
    np.testing.assert_array_equal(view_of(tokens, items, family).index >= 0, wanted["token_type_ids"][0] == 1)
    np.testing.assert_array_equal(np.concatenate([item.pixels for item in items]), wanted["pixel_values"])


@pytest.mark.parametrize("name", ["smolvlm", "internvl"])
def test_a_video_expands_as_in_transformers(name, tmp_path, monkeypatch):
    model, kind = make(name), processor_class(name)
    family = family_of(model, tmp_path)
    shown = Video(frames=video(frames=3).frames, times=np.array([0.0, 59.5, 125.25]), fps=0.5, duration=186.0)
    item = family.video(shown)
    module = import_module(f"transformers.models.{name}.processing_{name}")
    monkeypatch.setattr(module, "num2words", {3: "three"}.get, raising=False)
    metadata = SimpleNamespace(fps=8.0, timestamps=shown.times.tolist(), duration=186.0)
    processor = SimpleNamespace(
        image_token=WORDS[model.config.image_token_id],
        image_seq_len=4,
        image_seq_length=4,
        fake_image_token="<fake_token_around_image>",
        global_image_token="<global-img>",
        start_image_token="<img>",
        end_image_token="</img>",
    )
    key = "pixel_values" if name == "smolvlm" else "pixel_values_videos"
    found = {key: item.pixels[None], "video_metadata": [metadata]}
    assert family.expansion(item) == kind.replace_video_token(processor, found, 0)
    assert family.num_tokens(item) == 3 * 4
    how = family.image_processor
    resized = [np.asarray(Image.fromarray(frame).resize((16, 16), how.resample)) for frame in shown.frames]
    wanted = (np.stack(resized) / 255 - how.image_mean) / how.image_std
    np.testing.assert_allclose(item.pixels, wanted.transpose(0, 3, 1, 2), rtol=0, atol=1e-6)


def test_numbers_of_frames_in_words():
    words = {1: "one", 13: "thirteen", 20: "twenty", 64: "sixty-four", 100: "one hundred", 105: "one hundred and five"}
    assert {number: in_words(number) for number in words} == words
    assert (in_words(768), in_words(1000)) == ("seven hundred and sixty-eight", "1000")


def test_every_family_is_tested():
    assert set(NAMES) == set(FAMILIES) == set(PROCESSING)


@pytest.mark.parametrize("name", NAMES)
def test_a_model_of_published_sizes_passes_the_check_before_training(name):
    config = config_of(name, text_config={"rope_parameters": PUBLISHED[name]}) if name in PUBLISHED else config_of(name)
    kind = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[type(config)]
    values = json.dumps(shrink(config.to_dict()), default=str)
    assert max(compare(family_miniature(kind, values))) < 1e-5


@pytest.mark.parametrize("name", NAMES)
def test_a_processing_of_another_family_is_refused(name, tmp_path):
    config = make(name).config
    write_processing(tmp_path, "llava" if name != "llava" else "qwen3_vl")
    with pytest.raises(UserError, match=rf"preprocessor_config.json is of \w+ImageProcessor, and {name} takes"):
        find_family(str(tmp_path), config)


@pytest.mark.parametrize(
    ("name", "changed", "reason"),
    [
        ("qwen2_5_vl", {"patch_size": 16}, "patch_size = 16, and the model has 4"),
        ("qwen3_vl", {"merge_size": 1}, "merge_size = 1, and the model has 2"),
        ("smolvlm", {"max_image_size": {"longest_edge": 512}}, "max_image_size = 512, and the model has 16"),
        ("internvl", {"size": {"height": 448, "width": 448}}, r"size = \(448, 448\), and the model has \(16, 16\)"),
        ("llava", {"crop_size": 224}, r"crop_size = \(224, 224\), and the model has \(16, 16\)"),
        ("gemma3", {"size": {"height": 896, "width": 896}}, r"size = \(896, 896\), and the model has \(16, 16\)"),
    ],
)
def test_a_processing_of_another_size_is_refused(name, changed, reason, tmp_path):
    write_processing(tmp_path, name)
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({**PROCESSING[name], **changed}))
    with pytest.raises(UserError, match=f"pictures are processed with {reason}"):
        find_family(str(tmp_path), make(name).config)


def test_a_processing_is_also_read_from_the_file_of_newer_checkpoints(tmp_path):
    model = make("qwen3_vl")
    wanted = family_of(model, tmp_path).image(picture(32, 40, seed=0))
    (tmp_path / "preprocessor_config.json").unlink()
    with pytest.raises(UserError, match=r"has no preprocessor_config\.json"):
        find_family(str(tmp_path), model.config)
    (tmp_path / "processor_config.json").write_text(json.dumps({"image_processor": PROCESSING["qwen3_vl"]}))
    assert find_family(str(tmp_path), model.config).image(picture(32, 40, seed=0)).digest == wanted.digest


@pytest.mark.parametrize("name", ["paligemma", "mllama"])
def test_a_family_that_is_not_supported_is_named(name, tmp_path):
    with pytest.raises(UserError, match=f"pictures of {name} are not supported, only of qwen2_vl, "):
        find_family(str(tmp_path), config_of(name))


@pytest.mark.parametrize(
    ("model", "column"), [("text", "image_column"), ("text", "video_column"), ("idefics3", "video_column")]
)
def test_a_column_that_the_model_cannot_take_is_refused(model, column, tmp_path):
    if model == "text":
        write_tiny_model(tmp_path, num_layers=1)
    else:
        make(model).save_pretrained(tmp_path)
        write_processing(tmp_path, model)
    data = LLMDataConfig(path="rows.jsonl", chat_template="{{ messages }}", **{column: "shown"})
    with pytest.raises(UserError, match=rf"data\.{column} = 'shown': the model of .* takes no {column[:5]}s"):
        LLM.build_policy(LLMModelConfig(path=str(tmp_path)), data=data, sampling=None, seed=0, setup=ModelSetup())


def test_a_llava_with_a_tower_of_another_kind_is_refused(tmp_path):
    config = config_of("llava", vision_config={"model_type": "pixtral"})
    with pytest.raises(UserError, match="pictures of llava with pixtral are not supported"):
        find_family(str(tmp_path), config)


@pytest.mark.parametrize("name", [name for name in NAMES if name not in WITH_VIDEOS])
def test_a_video_is_refused_by_a_family_without(name, tmp_path):
    with pytest.raises(MediaError, match=f"videos of {name} are not supported"):
        family_of(make(name), tmp_path).video(video())

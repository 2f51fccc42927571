"""Rewards with a model: tiny random CLIP and LLaVA from their configs, saved and loaded by folder."""

import json
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.models import WordLevel
from wfm_fixtures import shown

from cosmos_rl_core.errors import UserError
from cosmos_rl_wfm.rewards import REWARDS
from cosmos_rl_wfm.rewards.aesthetic import AestheticHead, load_head
from cosmos_rl_wfm.rewards.aesthetic_train import train_aesthetic
from cosmos_rl_wfm.rewards.pretrained import Exclusive, Pretrained

WORDS = ["<s>", "</s>", "<unk>", "<image>", "a", "disc", "square", "moving", "left", "yes", "no", "Yes", "one", "two"]
VISION = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 8,
}
TEXT = {"vocab_size": len(WORDS), "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
CHAT = (
    "{% for m in messages %}{% for part in m['content'] %}"
    "{% if part['type'] == 'image' %}<image> {% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endfor %}"
)


make_group = partial(shown, caption="a disc moving left")


def clips(number: int, *, frames: int = 3, seed: int = 0) -> list[np.ndarray]:
    return list(np.random.default_rng(seed).integers(0, 256, (number, frames, 20, 24, 3), dtype=np.uint8))


def make_tokenizer():
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="</s>",
        unk_token="<unk>",
        extra_special_tokens=["<image>"],
    )


def make_image_processor():
    from transformers import CLIPImageProcessor

    return CLIPImageProcessor(size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16})


@pytest.fixture(scope="module")
def clip_folder(tmp_path_factory) -> Path:
    from transformers import CLIPConfig, CLIPModel

    folder = tmp_path_factory.mktemp("clip")
    text = TEXT | {"num_attention_heads": 2, "max_position_embeddings": 6, "bos_token_id": 0, "eos_token_id": 1}
    torch.manual_seed(0)
    CLIPModel(CLIPConfig(text_config=text, vision_config=VISION, projection_dim=8)).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    make_image_processor().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def llava_folder(tmp_path_factory) -> Path:
    from transformers import LlavaConfig, LlavaForConditionalGeneration, LlavaProcessor

    folder = tmp_path_factory.mktemp("llava")
    config = LlavaConfig(
        vision_config=VISION | {"model_type": "clip_vision_model"},
        text_config=TEXT | {"model_type": "llama", "num_attention_heads": 2, "max_position_embeddings": 128},
        image_token_index=WORDS.index("<image>"),
        image_token_id=WORDS.index("<image>"),
    )
    torch.manual_seed(0)
    LlavaForConditionalGeneration(config).save_pretrained(folder)
    processor = LlavaProcessor(
        make_image_processor(),
        make_tokenizer(),
        patch_size=8,
        vision_feature_select_strategy="default",
        chat_template=CHAT,
        num_additional_image_tokens=1,
    )
    processor.save_pretrained(folder)
    return folder


# CLIP.


def test_clip_score_is_the_mean_cosine_of_frames_and_text(clip_folder):
    from transformers import AutoImageProcessor, CLIPModel

    videos = clips(2)
    values = REWARDS["clip_score"](model=str(clip_folder), device="cpu")(make_group(*videos))

    model = CLIPModel.from_pretrained(clip_folder).eval()
    pixels = AutoImageProcessor.from_pretrained(clip_folder)(list(videos[1]), return_tensors="pt")["pixel_values"]
    tokens = torch.tensor([[WORDS.index(word) for word in ("a", "disc", "moving", "left")]])
    with torch.no_grad():
        frames = model.get_image_features(pixel_values=pixels).pooler_output
        text = model.get_text_features(input_ids=tokens, attention_mask=torch.ones_like(tokens)).pooler_output
    expected = torch.cosine_similarity(frames, text).mean()
    assert values[1] == pytest.approx(float(expected), abs=1e-5)


def test_siglip_reads_captions_padded_and_without_a_mask_as_it_was_trained(tmp_path):
    from transformers import SiglipConfig, SiglipModel

    text = TEXT | {"num_attention_heads": 2, "max_position_embeddings": 8}
    torch.manual_seed(0)
    model = SiglipModel(SiglipConfig(text_config=text, vision_config=VISION)).eval()
    model.save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    processor = make_image_processor()
    processor.save_pretrained(tmp_path)

    (video,) = clips(1)
    (value,) = REWARDS["clip_score"](model=str(tmp_path), device="cpu")(make_group(video, caption="a disc"))
    padding = WORDS.index("</s>")
    tokens = torch.tensor([[WORDS.index("a"), WORDS.index("disc"), *[padding] * 6]])
    with torch.no_grad():
        frames = model.get_image_features(**processor(list(video), return_tensors="pt")).pooler_output
        text = model.get_text_features(input_ids=tokens).pooler_output
    assert value == pytest.approx(float(torch.cosine_similarity(frames, text).mean()), abs=1e-5)


def test_clip_score_does_not_depend_on_the_batch(clip_folder):
    group = make_group(*clips(3))
    whole, single = (REWARDS["clip_score"](model=str(clip_folder), batch_size=size)(group) for size in (32, 1))
    assert whole == pytest.approx(single, abs=1e-5)
    assert len(set(whole)) == 3


def test_clip_score_reads_the_template_and_cuts_long_captions(clip_folder):
    group = make_group(*clips(1), caption="a disc moving left " * 20)
    plain = REWARDS["clip_score"](model=str(clip_folder))(group)
    other = REWARDS["clip_score"](model=str(clip_folder), template="two {caption}")(group)
    assert np.isfinite(plain).all() and plain != other


def test_threads_share_one_clip_model(clip_folder):
    reward, group = REWARDS["clip_score"](model=str(clip_folder)), make_group(*clips(2))
    alone = reward(group)
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(reward, [group] * 6)) == [alone] * 6


def test_an_exclusive_value_is_made_once_and_tried_again_after_a_failure():
    made = []

    def make() -> int:
        made.append(len(made))
        if len(made) == 1:
            raise OSError("not yet")
        return 7

    shared = Exclusive(make)
    with pytest.raises(OSError, match="not yet"), shared.use():
        pass
    with shared.use() as first:
        assert first == 7
    with shared.use() as second:
        assert second == 7
    assert made == [0, 1]


@pytest.mark.parametrize("name", ["clip_score", "vlm_judge"])
def test_a_missing_folder_is_found_when_the_recipe_is_read(name):
    with pytest.raises(ValidationError, match="there is no such folder"):
        REWARDS[name](model="./not/there")


def test_a_folder_without_a_model_is_an_error_that_names_it(tmp_path):
    with pytest.raises(UserError, match="cannot be loaded"):
        REWARDS["clip_score"](model=str(tmp_path))(make_group(*clips(1)))


def test_a_model_without_texts_is_no_clip(llava_folder):
    with pytest.raises(UserError, match="a CLIP or SigLIP model is needed"):
        REWARDS["clip_score"](model=str(llava_folder))(make_group(*clips(1)))


# A judge.


def judge(folder: Path, **options):
    return REWARDS["vlm_judge"](model=str(folder), device="cpu", question="moving {caption}", min_mass=0.0, **options)


def test_the_judge_returns_the_probability_of_yes_among_its_answers(llava_folder):
    from transformers import LlavaForConditionalGeneration, LlavaProcessor

    videos = clips(3, frames=2)
    values = judge(llava_folder)(make_group(*videos))

    processor = LlavaProcessor.from_pretrained(llava_folder)
    model = LlavaForConditionalGeneration.from_pretrained(llava_folder).eval()
    text = "<image> <image> moving a disc moving left"
    for video, value in zip(videos, values):
        inputs = processor(images=list(video), text=text, return_tensors="pt")
        with torch.no_grad():
            said = model(**inputs).logits[0, -1].softmax(-1)
        yes = float(said[WORDS.index("yes")] + said[WORDS.index("Yes")])
        assert value == pytest.approx(yes / (yes + float(said[WORDS.index("no")])), abs=1e-5)


def test_a_judge_may_rate(llava_folder):
    (value,) = judge(llava_folder, answers={"one": 1.0, "two": 2.0})(make_group(*clips(1)))
    assert 1.0 < value < 2.0


def test_a_judge_answers_the_same_clip_by_clip(llava_folder):
    group = make_group(*clips(3))
    together, apart = (judge(llava_folder, batch_size=size)(group) for size in (4, 1))
    assert together == pytest.approx(apart, abs=1e-5)


def test_a_judge_that_says_something_else_gives_no_number(llava_folder):
    reward = REWARDS["vlm_judge"](model=str(llava_folder), question="moving left", min_mass=0.9)
    with pytest.raises(
        ValueError, match=r"rollout 0 the judge gives the answers yes, no a total probability .* min_mass"
    ):
        reward(make_group(*clips(1)))


def test_an_answer_the_judge_has_no_token_for_is_named(llava_folder):
    with pytest.raises(UserError, match="no single token for the answer 'maybe'"):
        judge(llava_folder, answers={"yes": 1.0, "maybe": 0.5})(make_group(*clips(1)))


@pytest.mark.parametrize(
    "answers", [{"yes": 1.0}, {"yes": 1.0, "YES ": 0.0}, {"yes": 1.0, "no": 1.0}, {"yes": float("nan"), "no": 0.0}]
)
def test_answers_that_cannot_tell_clips_apart_are_refused(answers):
    with pytest.raises(ValidationError, match=r"must|finite"):
        REWARDS["vlm_judge"](model="some/model", answers=answers)


def test_a_judge_without_a_chat_template_is_refused(llava_folder, tmp_path):
    for file in llava_folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "chat_template.jinja").unlink()
    with pytest.raises(UserError, match="no chat template"):
        judge(tmp_path)(make_group(*clips(1)))


# An aesthetic head.


def scored_rows(number: int = 60) -> list[dict]:
    """Clips whose score is their brightness, from 0 to 10."""
    rng = np.random.default_rng(0)
    levels = rng.uniform(10, 245, number)
    videos = [np.clip(level + rng.normal(0, 5, (2, 6, 6, 3)), 0, 255).astype(np.uint8) for level in levels]
    return [{"video": video, "score": float(level / 25.5)} for video, level in zip(videos, levels)]


@pytest.mark.parametrize("hidden", [(), (8,)])
def test_a_head_learns_the_scores_of_rows_it_never_saw(hidden):
    trained = train_aesthetic(scored_rows(), hidden=hidden, steps=200)
    assert trained.constant_error > 1.5
    assert trained.held_out_error < 0.5


def test_a_saved_head_scores_groups_between_0_and_10(tmp_path):
    trained = train_aesthetic(scored_rows(), steps=200)
    trained.head.save(tmp_path / "head.safetensors")
    reward = REWARDS["aesthetic"](head=str(tmp_path / "head.safetensors"))
    dark, bright = reward(make_group(np.full((2, 6, 6, 3), 30, np.uint8), np.full((2, 6, 6, 3), 220, np.uint8)))
    assert 0 <= dark < 3 < 7 < bright <= 10


def test_a_head_over_clip_vectors_remembers_its_model(clip_folder, tmp_path):
    options = Pretrained(model=str(clip_folder), num_frames=2)
    trained = train_aesthetic(scored_rows(12), clip=options, steps=20)
    trained.head.save(tmp_path / "head.safetensors")
    head = load_head(tmp_path / "head.safetensors")
    assert (head.features, head.model, head.num_frames) == ("clip", str(clip_folder), 2)
    (value,) = REWARDS["aesthetic"](head=str(tmp_path / "head.safetensors"))(make_group(*clips(1)))
    assert 0 <= value <= 10


def test_a_head_scores_as_worked_out_by_hand():
    head = AestheticHead(
        features="statistics",
        model="",
        num_frames=1,
        mean=np.array([1.0], np.float32),
        scale=np.array([2.0], np.float32),
        layers=(
            (np.array([[1.0], [-1.0]], np.float32), np.zeros(2, np.float32)),
            (np.array([[3.0, 5.0]], np.float32), np.array([-3.0], np.float32)),
        ),
    )
    assert head.score(np.array([[3.0]])) == pytest.approx([5.0])  # relu(1), relu(-1) -> 3 - 3 = 0
    assert head.score(np.array([[1e6], [-1e6]])) == pytest.approx([10.0, 10.0])


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"video": clips(1)[0], "score": 11}, "row 0 has score 11"),
        ({"video": clips(1)[0]}, "row 0 has score None"),
        ({"video": "a.mp4", "score": 5}, "row 0 has no video"),
    ],
)
def test_a_bad_training_row_is_named(row, message):
    with pytest.raises(UserError, match=message):
        train_aesthetic([row])


def test_too_few_rows_are_an_error():
    with pytest.raises(UserError, match="too few"):
        train_aesthetic(scored_rows(2))


def test_another_safetensors_file_is_no_head(clip_folder, tmp_path):
    with pytest.raises(UserError, match="is not an aesthetic head"):
        load_head(clip_folder / "model.safetensors")
    (tmp_path / "text.safetensors").write_text(json.dumps({"not": "tensors"}))
    with pytest.raises(UserError, match="cannot be read as safetensors"):
        load_head(tmp_path / "text.safetensors")


def test_a_missing_head_is_found_when_the_recipe_is_read():
    with pytest.raises(ValidationError, match="there is no such file"):
        REWARDS["aesthetic"](head="nowhere.safetensors")

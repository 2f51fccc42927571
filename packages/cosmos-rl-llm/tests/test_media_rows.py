"""Rows with pictures and videos: whole chats, columns of tables, and rows that cannot be read."""

import io
import json
import threading
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from cosmos_rl_core import run
from cosmos_rl_core.errors import MediaError, PromptError, UserError
from cosmos_rl_core.parallel.rank_group import RankGroup
from cosmos_rl_core.types import Prompt, Share
from cosmos_rl_llm.config import LLMDataConfig, MediaSection
from cosmos_rl_llm.data.chat import Chat
from cosmos_rl_llm.data.collate import collate_sft, encode_row, pack_batch
from cosmos_rl_llm.data.items import begin_reading
from cosmos_rl_llm.data.reading import Ahead
from cosmos_rl_llm.data.rows import load_rows, normalise
from cosmos_rl_llm.media.source import LIMITS, PromptMedia
from cosmos_rl_llm.media.vision import Vision, find_family
from cosmos_rl_llm.policy.token_model import TermModel, TermOptions
from doubles.ranks import run_ranks

Image = pytest.importorskip("PIL.Image")

from tiny_vision import COLOURS, WORDS, family_of, make, picture, plain_logprobs, square, write_processing  # noqa: E402
from transformers import PreTrainedTokenizerFast  # noqa: E402

PAD = WORDS.index("<|image_pad|>")
END = WORDS.index("<eos>")
MARKED = (
    "{% for m in messages %}"
    "{% if m.role == 'assistant' %}<bot> {% generation %}{{ m.content }} <eos>{% endgeneration %}"
    "{% else %}<user> {% for p in m.content %}{% if p.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% else %} {{ p.text }}{% endif %}{% endfor %}{% endif %} {% endfor %}"
)


def png(image):
    file = io.BytesIO()
    image.save(file, format="png")
    return file.getvalue()


def shown(*names):
    return [{"type": "image", "image": name} for name in names]


TEXT = {"type": "text", "text": "what colour ?"}
CHAT = [
    {"role": "user", "content": [*shown("a.png"), TEXT]},
    {"role": "assistant", "content": "red"},
    {"role": "user", "content": [*shown("b.png", "a.png"), TEXT]},
    {"role": "assistant", "content": "blue ?"},
]


@pytest.fixture
def model():
    return make("qwen3_vl")


@pytest.fixture
def chat(model, tmp_path):
    for name, size in (("a", (16, 24)), ("b", (32, 20))):
        (tmp_path / f"{name}.png").write_bytes(png(picture(*size, seed=len(name))))
    return make_chat(model, tmp_path)


def make_chat(model, directory, *, template=None, **keys):
    family_of(model, directory)
    return read_chat(model, directory, template=template, **keys)


def read_chat(model, directory, *, template=None, **keys):
    family = find_family(str(directory), model.config)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(directory)
    tokenizer.chat_template = template or tokenizer.chat_template
    vision = Vision(family=family, limits=MediaSection(root=str(directory)))
    return Chat(tokenizer=tokenizer, end_ids=frozenset({END}), vision=vision, **keys)


def words(tokens):
    return [WORDS[token] for token in tokens]


def test_every_answer_of_a_chat_with_pictures_is_learnt(chat, model):
    sample = encode_row({"messages": CHAT}, chat=chat)
    assert words(sample.tokens[sample.loss_mask]) == ["red", "<eos>", "blue", "?", "<eos>"]
    assert len(sample.view.items) == 3
    tokens = np.concatenate([sample.prompt_tokens, sample.tokens])[:-1]
    assert np.array_equal(sample.view.index_of(sample.length) >= 0, tokens == PAD)
    wanted = plain_logprobs(model, chat.vision.family, sample.prompt_tokens, sample.tokens, sample.view.items)
    other = encode_row({"messages": CHAT[:2]}, chat=chat)
    module = TermModel(model, TermOptions(vision=chat.vision.family))
    batch = pack_batch([sample, other], microbatch_terms=10_000, share=Share(), metrics={})
    found, *_ = module(None, module.row(batch.microbatches[0].inputs))
    learnt = wanted[torch.from_numpy(sample.loss_mask)]
    torch.testing.assert_close(found[: len(learnt)], learnt, rtol=0, atol=1e-5)


def test_marks_of_the_template_find_the_same_turns(chat, model, tmp_path):
    marked = make_chat(model, tmp_path, template=MARKED)
    found = marked.encode_answers({"messages": CHAT})
    assert words(found.tokens[found.learnt]) == ["red", "<eos>", "blue", "?", "<eos>"]
    assert [item.digest for item in found.view.items] == [item.digest for item in chat.items(CHAT, where="")]


def test_a_cut_chat_has_the_pictures_before_its_last_answer(chat, model, tmp_path):
    whole = encode_row({"messages": CHAT}, chat=chat)
    length = len(whole.prompt_tokens) + 2 + 12  # inside of a picture of the second question
    short = make_chat(model, tmp_path, max_length=length, overlong="truncate")
    prompts = [Prompt(sample_id=0, row={"messages": CHAT})]
    (microbatch,) = collate_sft(prompts, chat=short, microbatch_terms=1000, share=Share()).microbatches
    assert words(microbatch.inputs["labels"]) == ["red", "<eos>"]
    assert len(microbatch.inputs["item_digest"]) == 1


def test_pictures_of_an_answer_are_refused(chat):
    answer = {"role": "assistant", "content": shown("a.png")}
    with pytest.raises(PromptError, match="row 1: a picture or video in a message of the assistant"):
        chat.encode_answers({"messages": [CHAT[0], answer]}, where="row 1")


def prompts_of(*rows):
    return [Prompt(sample_id=place, row=row, origin=f"rows.jsonl:{place + 1}") for place, row in enumerate(rows)]


def chat_row(*names, text=TEXT):
    return {"messages": [{"role": "user", "content": [*shown(*names), text]}, {"role": "assistant", "content": "red"}]}


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (chat_row("gone.png"), r"rows.jsonl:2: image: gone.png: No such file"),
        (chat_row("words.txt"), r"rows.jsonl:2: image: words.txt: not a picture that can be read"),
        (chat_row("cut.png"), r"rows.jsonl:2: image: cut.png: a damaged picture"),
        (chat_row("../a.png"), r"rows.jsonl:2: image: ../a.png is outside of data.media.root"),
        (chat_row("bomb.png"), r"rows.jsonl:2: image: bomb.png: 10000 x 10000 pixels, more than data.media.max_dec"),
        (
            chat_row("https://a.org/b.png"),
            r"rows.jsonl:2: image: https://a.org/b.png: URLs with https: are not allowed",
        ),
        (
            chat_row("a.png", text={"type": "text", "text": "<|image_pad|>"}),
            r"rows.jsonl:2: 2 placeholders in the chat, and 1 pict",
        ),
    ],
    ids=["missing", "no picture", "damaged", "outside", "bomb", "scheme", "placeholders"],
)
def test_a_row_that_cannot_be_read_is_dropped_and_counted(chat, tmp_path, row, reason):
    (tmp_path / "words.txt").write_text("no picture")
    (tmp_path / "cut.png").write_bytes((tmp_path / "a.png").read_bytes()[:200])
    (tmp_path / "bomb.png").write_bytes(png(Image.new("1", (10_000, 10_000))))
    prompts = prompts_of(chat_row("a.png"), row)
    batch = collate_sft(prompts, chat=chat, microbatch_terms=1000, share=Share())
    assert batch.num_rollouts == 1 and batch.metrics["rows_dropped"] == 1
    (dropped,) = batch.rows_dropped
    with pytest.raises(MediaError, match=reason):
        raise MediaError(dropped)


CHAT_ROW = {"messages": CHAT}
RESPONSE = {"prompt": [{"role": "user", "content": "what ?"}], "response": "red <|image_pad|>"}
RAW = {"messages": [{"role": "user", "content": "what <|video_pad|> ?"}, {"role": "assistant", "content": "red"}]}
ANSWER = {"messages": [*CHAT[:1], {"role": "assistant", "content": "red <|video_pad|>"}]}


@pytest.mark.parametrize(("row", "token"), [(RESPONSE, 5), (RAW, 6), (ANSWER, None)], ids=["response", "raw", "answer"])
def test_a_placeholder_in_text_drops_its_row(chat, row, token):
    batch = collate_sft(prompts_of(chat_row("a.png"), row), chat=chat, microbatch_terms=1000, share=Share())
    assert batch.num_rollouts == 1
    (dropped,) = batch.rows_dropped
    assert dropped.startswith("rows.jsonl:2: ")
    assert token is None or f"the text has token {token}, which stands for a picture or video: remove <" in dropped


def test_a_placeholder_in_a_prompt_of_text_is_an_error_of_its_row(chat):
    with pytest.raises(MediaError, match="row 1: the text has token 6"):
        chat.encode_prompt({"prompt": RAW["messages"][:1]}, where="row 1")
    plain = {"prompt": "what <|video_pad|> ?"}
    with pytest.raises(MediaError, match="row 1: the text has token 6"):
        chat.encode_prompt(plain, where="row 1")
    assert len(replace(chat, vision=None).encode_prompt(plain).tokens) == 3


@pytest.mark.parametrize("overlong", ["error", "drop"])
def test_a_row_that_is_too_long_with_its_pictures_is_dropped(chat, overlong):
    short = replace(chat, max_length=20, overlong=overlong)
    batch = collate_sft(prompts_of(chat_row("a.png"), CHAT_ROW), chat=short, microbatch_terms=1000, share=Share())
    assert (batch.num_rollouts, batch.metrics["rows_dropped"]) == (1, 1)
    (dropped,) = batch.rows_dropped
    assert (
        f"a row of {len(chat.encode_answers({'messages': CHAT}).tokens)} tokens, more than 20; it begins 'what colour"
        in dropped
    )


def test_rows_of_text_that_are_too_long_are_an_error_beside_pictures(chat):
    text = {"messages": [{"role": "user", "content": "what " * 30}, CHAT[1]]}
    with pytest.raises(UserError, match="is longer than the context of 20"):
        collate_sft(prompts_of(text), chat=replace(chat, max_length=20), microbatch_terms=1000, share=Share())


def test_a_run_ends_if_most_rows_are_too_long_with_their_pictures(chat):
    rows = prompts_of(*[CHAT_ROW] * 9)
    with pytest.raises(UserError, match=r"9 of 9 rows so far .*a row of"):
        collate_sft(rows, chat=replace(chat, max_length=5), microbatch_terms=1000, share=Share())


class Meeting:
    """A `Vision` that reads a picture only while another thread reads one too."""

    def __init__(self, vision):
        self.vision, self.both = vision, threading.Barrier(2)

    def __getattr__(self, name):
        return getattr(self.vision, name)

    def of_row(self, row):
        return self

    def item(self, part, *, where):
        self.both.wait(30)
        return self.vision.item(part, where=where)


def test_rows_are_read_side_by_side(chat):
    rows = [chat_row("a.png"), chat_row("b.png")]
    both = replace(chat, vision=Meeting(chat.vision))
    batch = collate_sft(prompts_of(*rows), chat=both, microbatch_terms=1000, share=Share())
    alone = collate_sft(prompts_of(*rows), chat=chat, microbatch_terms=1000, share=Share())
    assert batch.rows_dropped == ()
    for key, value in alone.microbatches[0].inputs.items():
        torch.testing.assert_close(batch.microbatches[0].inputs[key], value, rtol=0, atol=0)


def test_rows_that_were_read_ahead_are_not_read_again(chat, tmp_path):
    (tmp_path / "words.txt").write_text("no picture")
    prompts = prompts_of(chat_row("a.png"), chat_row("words.txt"), chat_row("b.png"))
    counted = Counted(chat.vision)
    reading = replace(chat, vision=counted, ahead=Ahead())
    begin_reading(prompts, reading)
    batch = collate_sft(prompts, chat=reading, microbatch_terms=1000, share=Share())
    assert (counted.decoded, set(counted.threads)) == (3, {"row-ahead"})
    alone = collate_sft(prompts, chat=chat, microbatch_terms=1000, share=Share())
    assert [reason[:31] for reason in batch.rows_dropped] == ["rows.jsonl:2: image: words.txt:"]
    for key, value in alone.microbatches[0].inputs.items():
        torch.testing.assert_close(batch.microbatches[0].inputs[key], value, rtol=0, atol=0)
    collate_sft(prompts, chat=reading, microbatch_terms=1000, share=Share())
    assert counted.decoded == 6  # what is taken is not kept


def test_other_rows_than_those_read_ahead_are_read(chat):
    counted = Counted(chat.vision)
    reading = replace(chat, vision=counted, ahead=Ahead())
    begin_reading(prompts_of(chat_row("a.png")), reading)
    others = prompts_of(chat_row("b.png"), chat_row("a.png"))  # the first has the number of the one above
    batch = collate_sft(others, chat=reading, microbatch_terms=1000, share=Share())
    alone = collate_sft(others, chat=chat, microbatch_terms=1000, share=Share())
    assert batch.microbatches[0].inputs["item_digest"].tolist() == alone.microbatches[0].inputs["item_digest"].tolist()
    assert sum(name != "row-ahead" for name in counted.threads) == 2


def test_an_error_of_reading_ahead_is_raised_where_the_row_is_taken():
    ahead, (prompt,) = Ahead(), prompts_of({"prompt": "x"})
    ahead.begin([prompt], lambda prompt: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        ahead.take(prompt, str)


def read_together(rank, world_size, *, directory):
    """Pictures of this rank's share, the number that it has decoded, and the reasons of dropped rows."""
    directory = Path(directory)
    chat = read_chat(make("qwen3_vl"), directory, ranks=RankGroup.of_all if world_size > 1 else RankGroup)
    counted = Counted(chat.vision)
    rows = [chat_row(f"{place}.png") for place in range(8)] + [chat_row("words.txt"), chat_row("0.png", "1.png")]
    batch = collate_sft(
        prompts_of(*rows),
        chat=replace(chat, vision=counted),
        microbatch_terms=30,
        share=Share(index=rank, count=world_size),
    )
    shown = [each.inputs for each in batch.microbatches if "item_digest" in each.inputs]
    return {
        "digests": np.concatenate([inputs["item_digest"].numpy() for inputs in shown]),
        "pixels": sum(inputs["pixels"].double().sum().numpy() for inputs in shown),
        "decoded": np.array(counted.decoded),
        "dropped": np.array(batch.rows_dropped),
        "counts": np.array([batch.num_terms, batch.num_rollouts, batch.metrics["rows_dropped"]]),
    }


class Counted:
    """A `Vision` that counts the pictures it decodes."""

    def __init__(self, vision):
        self.vision, self.decoded, self.threads = vision, 0, []

    def __getattr__(self, name):
        return getattr(self.vision, name)

    def of_row(self, row):
        return self

    def item(self, part, *, where):
        self.decoded += 1
        self.threads.append(threading.current_thread().name)
        return self.vision.item(part, where=where)


@pytest.mark.ci
def test_a_rank_decodes_its_part_of_the_pictures_and_those_it_trains_on(tmp_path):
    for place in range(8):
        picture(16 + 8 * (place % 3), 16, seed=place).save(tmp_path / f"{place}.png")
    (tmp_path / "words.txt").write_text("no picture")
    write_processing(tmp_path)
    whole = read_together(0, 1, directory=str(tmp_path))
    ranks = run_ranks(read_together, 3, directory=str(tmp_path))
    assert whole["decoded"] == 11
    assert len(whole["dropped"]) == 1
    for found in ranks:
        assert found["counts"].tolist() == whole["counts"].tolist()
        assert found["dropped"].tolist() == whole["dropped"].tolist()
        assert found["decoded"] <= 5 + len(found["digests"]) < 11  # rows 0, 3, 6, 9 or the like, and its share
    assert {digest for found in ranks for digest in found["digests"]} == set(whole["digests"])
    assert sum(found["pixels"] for found in ranks) == pytest.approx(float(whole["pixels"]))


def test_a_picture_for_a_model_of_text_is_an_error_of_its_row(chat):
    """Such as a chat of a list of prompts; a column of pictures is refused before the start."""
    plain = replace(chat, vision=None)
    row = {"prompt": CHAT[:1]}
    with pytest.raises(PromptError, match="row 1: 'image' in a chat, and model and engine read text"):
        plain.encode_prompt(row, where="row 1")


def test_pictures_are_read_with_the_settings_of_the_rows_own_section(chat, tmp_path):
    """Such as [eval.data] beside [data], in supervised training, in engines and for rewards."""
    (tmp_path / "held_out").mkdir()
    (tmp_path / "held_out/c.png").write_bytes(png(picture(16, 24, seed=7)))
    media = MediaSection(root=str(tmp_path / "held_out"), max_pixels=64)
    config = LLMDataConfig(path="rows.jsonl", media=media, messages_column="messages", image_column="picture")
    given = {"messages": [{"role": "user", "content": "what colour ?"}, CHAT[1]], "picture": "c.png", LIMITS: {}}
    row = normalise(given, where="row 1", config=config)
    assert [item.grid for item in encode_row(row, chat=chat).view.items] == [(1, 2, 2)]
    assert [item.grid for item in chat.encode_prompt(row).view.items] == [(1, 2, 2)]
    assert PromptMedia(row, chat.vision.limits)["image"].shape == (16, 24, 3)
    with pytest.raises(MediaError, match=r"c\.png: No such file"):
        encode_row({**row, LIMITS: {"root": str(tmp_path)}}, chat=chat)


def test_a_video_without_frames_is_dropped(chat, tmp_path):
    av = pytest.importorskip("av")
    with av.open(tmp_path / "silent.mp4", "w", format="mp4") as container:
        stream = container.add_stream("aac", rate=8000)
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), format="fltp", layout="mono")
        frame.sample_rate = 8000
        container.mux([*stream.encode(frame), *stream.encode()])
    row = {"messages": [{"role": "user", "content": [{"type": "video", "video": "silent.mp4"}]}, CHAT[1]]}
    batch = collate_sft(prompts_of(chat_row("a.png"), row), chat=chat, microbatch_terms=1000, share=Share())
    (dropped,) = batch.rows_dropped
    assert dropped.startswith("rows.jsonl:2: video: silent.mp4: ") and "no video" in dropped


def test_a_folder_without_the_pictures_ends_the_run(chat):
    prompts = prompts_of(*[chat_row("gone.png")] * 9)
    with pytest.raises(UserError, match=r"9 of 9 rows so far cannot be learnt: rows.jsonl:1: image: gone.png: No such"):
        collate_sft(prompts, chat=chat, microbatch_terms=1000, share=Share())


def load(path, rows, **keys):
    pyarrow = pytest.importorskip("pyarrow", reason="an extra of the package")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return load_rows(LLMDataConfig(path=str(path), **keys))[0]


def test_bytes_of_a_table_are_read(chat, tmp_path):
    content = (tmp_path / "a.png").read_bytes()
    rows = [
        {"prompt": "what ?", "images": [{"bytes": content, "path": "x.png"}, {"bytes": content, "path": None}]},
        {"prompt": "what ?", "images": [{"bytes": None, "path": "a.png"}]},
        {"prompt": "what ?", "images": []},
    ]
    found = load(tmp_path / "a.parquet", rows, image_column="images")
    wanted = chat.items([{"role": "user", "content": shown("a.png")}], where="")[0].digest
    assert [[item.digest for item in chat.items(row["prompt"], where="")] for row in found] == [
        [wanted] * 2,
        [wanted],
        [],
    ]
    assert ["images" in row for row in found] == [False, True, True]  # bytes are in the prompt alone
    json.dumps(found)
    (single,) = load(tmp_path / "b.parquet", [{"prompt": "what ?", "picture": content}], image_column="picture")
    assert len(chat.items(single["prompt"], where="")) == 1


def test_bytes_of_a_datasets_feature_are_not_decoded(chat, tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets", reason="an extra of the package")
    features = datasets.Features({"prompt": datasets.Value("string"), "images": [datasets.Image()]})
    rows = {
        "prompt": ["what ?"],
        "images": [[str(tmp_path / "a.png"), {"bytes": png(picture(16, 16, seed=0)), "path": None}]],
    }
    dataset = datasets.Dataset.from_dict(rows, features=features)
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: dataset)
    (found,), _ = load_rows(LLMDataConfig(path="some/pictures", image_column="images"))
    assert [item.kind for item in chat.items(found["prompt"], where="")] == ["image", "image"]


EMPTY = {"type": "image", "text": None}


def test_parts_without_a_location_take_the_pictures_of_the_column(tmp_path):
    messages = [{"role": "user", "content": [EMPTY, TEXT, EMPTY]}, {"role": "assistant", "content": "red"}]
    config = LLMDataConfig(path="rows.jsonl", messages_column="messages", image_column="images")
    row = normalise({"messages": messages, "images": ["a.png", "b.png"]}, where="row 1", config=config)
    assert [part.get("image") for part in row["prompt"][0]["content"]] == ["a.png", None, "b.png"]
    with pytest.raises(UserError, match=r"row 1: 2 parts of type 'image' without a location, and 3 in the column"):
        normalise({"messages": messages, "images": ["a.png"] * 3}, where="row 1", config=config)
    with pytest.raises(UserError, match="row 1: 2 parts of type 'image' without a location, and 0"):
        normalise({"messages": messages}, where="row 1", config=config.model_copy(update={"image_column": None}))


def test_pictures_need_a_chat_template():
    with pytest.raises(ValidationError, match="image_column needs a chat template"):
        LLMDataConfig(path="rows.jsonl", image_column="picture", chat_template="none")


def brightness(group):
    return [float(rollout.media["image"].mean()) / 255 for rollout in group.rollouts]


@pytest.mark.ci
def test_chats_with_pictures_train_beside_damaged_rows(tmp_path, monkeypatch):
    threads = []
    item = Vision.item

    def noted(self, part, *, where):
        threads.append(threading.current_thread().name)
        return item(self, part, where=where)

    monkeypatch.setattr(Vision, "item", noted)
    base = tmp_path / "base"
    make("qwen3_vl").save_pretrained(base)
    write_processing(base)
    rows = []
    for number, (name, colour) in enumerate([*COLOURS.items()] * 4):
        square(colour, dark_rows=number + 1).save(tmp_path / f"{number}.png")
        content = [*shown(f"{number}.png"), TEXT]
        rows.append({"messages": [{"role": "user", "content": content}, {"role": "assistant", "content": name}]})
    rows[5]["messages"][0]["content"][0]["image"] = "gone.png"
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    common = {
        "data": {
            "path": str(tmp_path / "rows.jsonl"),
            "messages_column": "messages",
            "media": {"root": str(tmp_path)},
        },
        "policy": {"prompts_per_step": 6, "optimizer": {"learning_rate": 3e-3}},
    }
    taught = run({
        **common,
        "run": {"domain": "llm", "max_steps": 20, "placement": "inline", "output_dir": str(tmp_path / "sft")},
        "model": {"path": str(base)},
        "algorithm": {"name": "sft"},
    })  # fmt: skip
    assert taught.metrics[-1]["loss"] < 0.2 * taught.metrics[0]["loss"]
    assert sum(step["rows_dropped"] for step in taught.metrics) == 10  # once an epoch of two steps
    assert Counter(threads)["row-ahead"] == 19 * 6  # of all steps but the first, beside the step before
    assert sum(name.startswith("media") for name in threads) == 6
    (line,) = (tmp_path / "sft" / "rows_dropped.jsonl").read_text().splitlines()
    assert json.loads(line)["reason"] == "rows.jsonl:6: image: gone.png: No such file or directory"
    drawn = run({
        **common,
        "run": {"domain": "llm", "max_steps": 2, "placement": "inline", "output_dir": str(tmp_path / "grpo")},
        "model": {"path": str(taught.checkpoint / "policy")},
        "algorithm": {"name": "grpo"},
        "rollout": {"group_size": 2, "sampling": {"max_tokens": 3}},
    }, rewards=[brightness])  # fmt: skip
    assert 0 < drawn.metrics[0]["reward_mean"] < 1
    lines = [json.loads(line) for line in (tmp_path / "grpo/rollouts/step_000000.jsonl").read_text().splitlines()]
    shown_files = [line["prompt_media"]["image"] for line in lines if "prompt_media" in line]
    assert len(shown_files) == len(lines) / 2 and all((tmp_path / name).is_file() for name in shown_files)

"""Pictures and videos are looked at before the start: root, headers, and limits that the model does not have."""

import base64
import json

import pytest

from cosmos_rl_llm.config import LLMDataConfig
from cosmos_rl_llm.data.rows import normalise
from cosmos_rl_llm.media.preflight import TILED, media_problems
from cosmos_rl_llm.media.vision import FAMILIES
from cosmos_rl_llm.model.checkpoint import legacy_template
from cosmos_rl_llm.preflight import _template

pytest.importorskip("av")
pytest.importorskip("PIL")

from tiny_vision import QWEN, mp4, picture


@pytest.fixture
def problems(tmp_path):
    picture(8, 8, seed=0).save(tmp_path / "a.png")
    (tmp_path / "a.mp4").write_bytes(mp4(frames=2))
    (tmp_path / "words.png").write_text("words")

    def find(*names, kind="qwen3_vl", held_out=(), **media):
        (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
        column = "video_column" if names and str(names[0]).endswith("mp4") else "image_column"
        keys = {column: "shown", "media": {"root": str(tmp_path), **media}}
        config = LLMDataConfig(path="rows.jsonl", **keys)
        rows = [
            [normalise({"prompt": "what ?", "shown": n}, where="", config=config) for n in each]
            for each in (names, held_out)
        ]
        return list(media_problems(config, tmp_path, rows=rows[0], held_out=rows[1]))

    return find


def test_pictures_and_videos_that_can_be_read_are_no_problem(problems):
    assert problems() == problems("a.png") == problems("a.mp4") == problems("a.png", held_out=["a.png"]) == []


def test_a_wrong_root_is_a_problem(problems, tmp_path):
    (found,) = problems("a.png", "a.png", root=str(tmp_path / "elsewhere"))
    assert not found.is_note
    assert (
        "2 of the first 2 pictures and videos cannot be read, such as [data]: image: a.png: No such file" in found.wrong
    )
    (found,) = problems("a.png", held_out=["b.png"])
    assert found.key == "eval.data.media" and not found.is_note


def test_some_that_cannot_be_read_are_a_note(problems):
    (found,) = problems("a.png", "words.png")
    assert found.is_note and "1 of the first 2" in found.wrong and "words.png: not a picture" in found.wrong


@pytest.mark.parametrize("name", ["a.png", "a.mp4"])
def test_limits_hold_for_headers(problems, name):
    (found,) = problems(name, max_decoded_pixels=10)
    assert "max_decoded_pixels = 10" in found.wrong


def test_only_the_first_ones_are_read(problems):
    assert problems(*["a.png"] * 8, "gone.png") == []


def test_nothing_is_fetched_from_the_network(problems):
    assert problems("https://localhost:1/a.png", "HTTP://localhost:1/b.png", schemes=["https", "http"]) == []


def test_a_column_of_another_form_is_not_read(problems, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_vl"}))
    config = LLMDataConfig(path="rows.jsonl", prompt_column="messages")
    given = {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": str(tmp_path / "a.png")}]}]}
    row = normalise(given, where="", config=config)
    assert list(media_problems(config, tmp_path, rows=[row], held_out=[])) == []


def test_content_in_the_row_is_read(problems):
    (found,) = problems({"bytes": base64.b64encode(b"words").decode()})
    assert "blake2b:" in found.wrong


@pytest.mark.parametrize("kind", TILED)
def test_limits_of_size_are_a_problem_for_tiles(problems, kind):
    (found,) = problems("a.png", kind=kind, max_pixels=100)
    assert f"{kind} takes pictures in tiles of one size" in found.wrong
    assert problems("a.png", kind="qwen2_vl", max_pixels=100) == []


def test_every_family_has_tiles_or_any_size():
    assert {*TILED, *QWEN} == set(FAMILIES)


def test_a_template_may_be_in_the_processors_older_file(tmp_path):
    config = LLMDataConfig(path="rows.jsonl")
    assert _template(tmp_path, config) is legacy_template(tmp_path) is None
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "{{ messages }}"}))
    assert _template(tmp_path, config) == "{{ messages }}"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "own"}))
    assert _template(tmp_path, config) == "own"

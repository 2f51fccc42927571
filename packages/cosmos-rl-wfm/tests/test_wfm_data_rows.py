"""Rows are found in folders, lists of prompts and mock data; what is missing is named, once, and counted."""

import json
import subprocess
import sys

import numpy as np
import pytest
from pydantic import ValidationError

from cosmos_rl_core.data.source import UsableRows
from cosmos_rl_core.errors import UserError
from cosmos_rl_wfm.data.config import WFMDataConfig
from cosmos_rl_wfm.data.mock import mock_caption, mock_clip, mock_embedding
from cosmos_rl_wfm.data.rows import kind_of, load_rows

CLIP = {"frames": 9, "height": 16, "width": 16}
IMAGE = {**CLIP, "frames": 1}


def config(path, *, size=CLIP, **keys):
    return WFMDataConfig.model_validate({"path": str(path), "size": size, **keys})


def fill(folder, names):
    """Files by path, with their text."""
    for name, text in names.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


@pytest.fixture
def folder(tmp_path):
    return fill(
        tmp_path / "clips",
        {"metas/b.txt": " a bee \n", "metas/a.txt": "an ant", "videos/a.mp4": "", "videos/b.mp4": "", "videos/.x": ""},
    )


def test_a_folder_gives_a_row_a_clip_by_name(folder):
    rows, origin = load_rows(config(folder, fps=16))
    assert origin == "clips"
    assert [(row["key"], row["caption"], row["fps"], row["text_embedding"]) for row in rows] == [
        ("a", "an ant", 16, ""),
        ("b", "a bee", 16, ""),
    ]
    assert [row["video"] for row in rows] == [f"{folder}/videos/a.mp4", f"{folder}/videos/b.mp4"]


def test_rows_are_found_without_torch_and_without_decoding(folder):
    code = (
        "import sys; from cosmos_rl_wfm.data.rows import load_rows\n"
        "from cosmos_rl_wfm.data.config import WFMDataConfig\n"
        f"load_rows(WFMDataConfig.model_validate({{'path': {str(folder)!r}, 'size': {CLIP!r}}}))\n"
        "print([name for name in ('torch', 'av', 'diffusers', 'webdataset') if name in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_rows_of_a_module_are_a_list_of_prompts(tmp_path, monkeypatch):
    (tmp_path / "python_prompts.py").write_text(
        "def prompts():\n    return [{'caption': f'disc {i}', 'video': '/clips/a.mp4'} for i in range(3)]\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    rows, origin = load_rows(WFMDataConfig.model_validate({"rows": "python_prompts:prompts", "size": CLIP, "limit": 2}))
    assert origin == "python_prompts:prompts"
    assert [(row["key"], row["caption"], row["video"]) for row in rows] == [
        ("python_prompts:prompts[0]", "disc 0", "/clips/a.mp4"),
        ("python_prompts:prompts[1]", "disc 1", "/clips/a.mp4"),
    ]
    with pytest.raises(ValidationError, match="rows replaces path and kind"):
        WFMDataConfig.model_validate({"rows": "python_prompts:prompts", "kind": "mock", "size": CLIP})


def test_embeddings_are_found_and_safetensors_come_first(folder):
    fill(folder, {"text_embedding/a.pickle": "", "text_embedding/a.safetensors": "", "t5_xxl/b.pickle": ""})
    rows, _ = load_rows(config(folder))
    assert [row["text_embedding"] for row in rows] == [
        f"{folder}/text_embedding/a.safetensors",
        f"{folder}/t5_xxl/b.pickle",
    ]
    rows, _ = load_rows(config(folder, text_embeddings="off"))
    assert [row["text_embedding"] for row in rows] == ["", ""]


def test_what_lacks_its_other_half_is_left_out_counted_and_named(folder, caplog):
    fill(folder, {"metas/c.txt": "no clip of this", "videos/d.mp4": "", "metas/e.txt": " ", "videos/e.mp4": ""})
    rows, _ = load_rows(config(folder))
    assert [row["key"] for row in rows] == ["a", "b"]
    (line,) = caplog.messages
    assert line == f"{folder}: 3 left out: c (no clip); d (no caption); e (its caption is empty)"


def test_images_are_rows_of_one_frame(tmp_path):
    fill(tmp_path, {"metas/a.txt": "an ant", "images/a.PNG": "", "metas/b.txt": "a bee", "videos/b.mp4": ""})
    rows, _ = load_rows(config(tmp_path, size=IMAGE))
    assert [row["video"] for row in rows] == [f"{tmp_path}/images/a.PNG", f"{tmp_path}/videos/b.mp4"]


def test_images_alone_are_no_videos(tmp_path):
    fill(tmp_path, {"metas/a.txt": "an ant", "images/a.jpg": ""})
    with pytest.raises(UserError, match=r"holds only images; set data\.size\.frames = 1"):
        load_rows(config(tmp_path))


def test_captions_and_clips_may_lie_side_by_side(tmp_path, caplog):
    caption = json.dumps({"caption": "an ant", "score": 3})
    fill(
        tmp_path, {"a.json": caption, "a.mp4": "", "b.txt": "a bee", "b.mp4": "", "c.json": '{"text": 1}', "c.mp4": ""}
    )
    rows, _ = load_rows(config(tmp_path))
    assert [(row["key"], row["caption"], row.get("score")) for row in rows] == [
        ("a", "an ant", 3),
        ("b", "a bee", None),
    ]
    assert "1 left out: c (no column 'caption' (data.caption_column); there are 'text')" in caplog.text


def test_captions_without_any_clips_are_prompts(tmp_path):
    fill(tmp_path, {"metas/a.txt": "an ant"})
    (row,), _ = load_rows(config(tmp_path))
    assert (row["caption"], row["video"]) == ("an ant", "")


@pytest.mark.parametrize(
    ("files", "wrong"),
    [
        ({}, "no clips. A folder holds videos/NAME.mp4 .* it has no files"),
        ({"notes.md": ""}, "it has notes.md"),
        ({"metas/a.txt": "", "videos/a.mp4": ""}, r"no row is left: a \(its caption is empty\)"),
        ({"metas/a.txt": "x", "videos/b.mp4": ""}, r"no row is left: a \(no clip\); b \(no caption\)"),
    ],
)
def test_a_folder_without_rows_is_one_clear_error(tmp_path, files, wrong):
    with pytest.raises(UserError, match=wrong):
        load_rows(config(fill(tmp_path, files)))


def test_a_missing_folder_is_named(tmp_path):
    with pytest.raises(UserError, match="nowhere': there is no such folder"):
        load_rows(config(tmp_path / "nowhere"))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("p.txt", "an ant\n\n a bee\n"),
        ("p.jsonl", '{"caption": "an ant"}\n{"caption": "a bee", "video": "clips/b.mp4", "key": "bee"}\n'),
        ("p.json", '[{"caption": "an ant"}, {"caption": "a bee", "extra": 1}]'),
    ],
)
def test_lists_of_prompts_are_rows(tmp_path, name, text):
    fill(tmp_path, {name: text})
    rows, origin = load_rows(config(tmp_path / name))
    assert origin == name
    assert [row["caption"] for row in rows] == ["an ant", "a bee"]
    if name == "p.jsonl":
        assert (rows[1]["video"], rows[1]["key"], rows[0]["key"]) == (f"{tmp_path}/clips/b.mp4", "bee", "p.jsonl:1")
    assert rows[0]["video"] == ""


@pytest.mark.parametrize(
    ("name", "text"), [("p.jsonl", '{"caption": "an ant"}'), ("p.json", '[{"caption": "an ant"}]'), ("p.txt", "an ant")]
)
def test_a_byte_order_mark_is_no_part_of_a_caption(tmp_path, name, text):
    fill(tmp_path, {name: "\ufeff" + text})
    assert [row["caption"] for row in load_rows(config(tmp_path / name))[0]] == ["an ant"]


def test_a_list_of_more_than_a_gigabyte_is_not_read(tmp_path):
    with (tmp_path / "p.jsonl").open("wb") as file:
        file.truncate(2**30 + 1)
    with pytest.raises(UserError, match=r"p\.jsonl: 1,073,741,825 bytes, at most"):
        load_rows(config(tmp_path / "p.jsonl"))


def test_another_column_is_the_caption(tmp_path):
    fill(tmp_path, {"p.jsonl": '{"prompt": "an ant"}'})
    (row,), _ = load_rows(config(tmp_path / "p.jsonl", caption_column="prompt"))
    assert row["caption"] == "an ant"


def test_a_wrong_prompt_among_others_is_dropped_and_counted(tmp_path):
    fill(tmp_path, {"p.jsonl": '{"caption": "x"}\n{"text": "y"}\n{"caption": "z"}'})
    rows, _ = load_rows(config(tmp_path / "p.jsonl"))
    assert [row["caption"] for row in rows] == ["x", "z"]
    assert isinstance(rows, UsableRows) and rows.numbers == [1, 3]
    assert "1 of 3 rows cannot be used; the first: p.jsonl:2: no column 'caption'" in rows.note


@pytest.mark.parametrize(
    ("name", "text", "wrong"),
    [
        ("p.jsonl", '{"text": "y"}', r"p\.jsonl:1: no column 'caption'.* there are 'text'"),
        ("p.jsonl", '{"caption": "x"}\n{"caption": ', r"p\.jsonl:2: not valid JSON"),
        ("p.jsonl", '{"caption": 3}', r"p\.jsonl:1: column 'caption' holds a int, not text"),
        ("p.jsonl", '{"caption": "x", "video": 3}', r"p\.jsonl:1: a path is text, not a int"),
        ("p.jsonl", "[1]", r"p\.jsonl:1: a row is an object"),
        ("p.jsonl", '{"caption": "x", "n": %s}' % ("9" * 5000), r"p\.jsonl:1: an integer of more than 4300 digits"),
        ("p.jsonl", '{"caption": "x"}\n' + "[" * 5000, r"p\.jsonl:2: lists and objects are nested"),
        ("p.jsonl", '{"caption": "x", "fps": NaN}', r"p\.jsonl:1: NaN is not a number"),
        ("p.json", "[" * 5000, r"p\.json: lists and objects are nested"),
        ("p.json", "{}", "must hold a list of rows"),
        ("p.txt", "\n\n", "no row is left"),
    ],
    ids=lambda value: value[:40],
)
def test_a_wrong_prompt_is_named(tmp_path, name, text, wrong):
    fill(tmp_path, {name: text})
    with pytest.raises(UserError, match=wrong):
        load_rows(config(tmp_path / name))


def test_limit_takes_the_first_rows(folder, tmp_path):
    assert [row["key"] for row in load_rows(config(folder, limit=1))[0]] == ["a"]
    fill(tmp_path, {"p.txt": "a\nb\nc"})
    assert len(load_rows(config(tmp_path / "p.txt", limit=2))[0]) == 2


def test_mock_rows_need_nothing():
    rows, origin = load_rows(config("", kind="mock", mock={"rows": 20, "embedding_tokens": 4}))
    assert origin == "mock" and len(rows) == 20
    assert rows[0]["caption"] == "a red gradient moves right" == mock_caption(0) != mock_caption(1)
    assert (rows[5]["video"], rows[5]["text_embedding"]) == ("mock:5", "mock:5")


@pytest.mark.parametrize(("index", "axis", "shift"), [(0, 2, 1), (4, 2, -1), (8, 1, 1), (12, 1, -1)])
def test_a_mock_clip_moves_as_its_caption_says(index, axis, shift):
    clip = mock_clip(index, frames=4, height=32, width=32)
    assert clip.dtype == np.uint8 and np.ptp(clip[0]) > 200
    assert np.array_equal(clip[1], np.roll(clip[0], 2 * shift, axis=axis - 1))


def test_a_mock_embedding_is_that_of_its_caption():
    assert mock_caption(3) == mock_caption(19)
    same, other = (mock_embedding(index, tokens=4, width=64) for index in (19, 4))
    assert np.array_equal(mock_embedding(3, tokens=4, width=64), same)
    assert not np.allclose(same, other)


@pytest.mark.parametrize(
    ("keys", "wrong"),
    [
        ({"buckets": ["480by832"]}, "480by832' is no height by width"),
        ({"fps": 16, "stride": 2}, "remove one"),
        ({"path": ""}, "path is missing"),
        ({"kind": "mock"}, "reads no files"),
        ({"caption_dropout": 1.0}, "less than 1"),
        ({"sise": 1}, "Extra inputs"),
    ],
)
def test_keys_that_do_not_fit_are_refused(keys, wrong):
    with pytest.raises(ValidationError, match=wrong):
        config(keys.pop("path", "x"), **keys)


def test_sizes_are_the_buckets_or_the_size():
    assert config("x").sizes == ((16, 16),)
    assert config("x", buckets=["480x832", "832x480"]).sizes == ((480, 832), (832, 480))


@pytest.mark.parametrize(
    ("path", "kind"),
    [("a.jsonl", "prompts"), ("a.txt", "prompts"), ("s3://b/c-{000..010}.tar", "webdataset"), ("c.tar", "webdataset")],
)
def test_the_kind_goes_by_the_path(path, kind):
    assert kind_of(config(path)) == kind


def test_a_folder_of_shards_is_known_by_them(tmp_path, folder):
    fill(tmp_path / "shards", {"a.tar": ""})
    assert kind_of(config(tmp_path / "shards")) == "webdataset"
    assert kind_of(config(folder)) == "folder"

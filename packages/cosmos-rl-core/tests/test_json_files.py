"""JSON of users: read, or refused by one UserError that names the file and the row; memory is bounded."""

import io
import json
import random
import tracemalloc
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cosmos_rl_core.errors import UserError
from cosmos_rl_core.recipe.load import apply_overrides, read_toml
from cosmos_rl_core.storage.json_files import (
    MAX_FILE_BYTES,
    MAX_LINE_BYTES,
    parse_json,
    read_json_lines,
    read_json_list,
)
from cosmos_rl_core.storage.json_files import read_json_object as read_object

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)


@settings(max_examples=40)
@given(VALUES, st.booleans(), st.sampled_from([b"", b"\xef\xbb\xbf"]))
def test_what_was_written_is_read(value, ascii_only, mark):
    text = json.dumps(value, ensure_ascii=ascii_only).encode()
    assert parse_json(mark + text, where="x") == value


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("9" * 5000, "x: an integer of more than 4300 digits"),
        ("[" * 200_000 + "]" * 200_000, "x: lists and objects are nested more than 100 deep"),
        ("[" * 101 + "]" * 101, "x: lists and objects are nested more than 100 deep"),
        ("[" * 5000, "x: lists and objects are nested more than 100 deep"),
        ('{"a": NaN}', "x: NaN is not a number"),
        ("[-Infinity]", "x: -Infinity is not a number"),
        ("1e999", "x: 1e999 is larger than any float"),
        (r'["\ud800"]', "x: half of a surrogate pair"),
        (r'{"\udc00": 1}', "x: half of a surrogate pair"),
        (b"\xff\xfe{\x00}\x00", r"x: not a text in UTF-8 \(byte 0\)"),
        ('{"a": 1', r"x: not valid JSON: .* \(column 8\)"),
        ('[\n{"a" 1}]', r"x: not valid JSON: .* \(line 2, column 6\)"),
        ("", "x: not valid JSON"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_is_no_json_is_named(text, says):
    with pytest.raises(UserError, match=f"^{says}"):
        parse_json(text, where="x")


def test_a_pair_of_surrogates_is_a_character_and_100_levels_are_read():
    assert parse_json(r'"\ud83d\ude00"', where="x") == "\U0001f600"
    assert parse_json("[" * 100 + "]" * 100, where="x")


def test_configurations_may_hold_infinity():
    assert parse_json("[Infinity]", where="x", finite=False) == [float("inf")]


def test_lines_have_their_places():
    file = io.BytesIO(b'\xef\xbb\xbf{"a": 1}\r\n\n \n{"a": 2}\n"end"')
    assert list(read_json_lines(file, name="f")) == [("f:1", {"a": 1}), ("f:4", {"a": 2}), ("f:5", "end")]


def test_a_line_of_a_gigabyte_is_refused_in_little_memory(tmp_path):
    file = tmp_path / "long.jsonl"
    with file.open("wb") as made:
        made.write(b"{}\n")
        made.truncate(2**30)  # one line of zeros
    tracemalloc.start()
    with file.open("rb") as lines, pytest.raises(UserError, match=r"long:2: the line is longer than 67,108,864 bytes"):
        list(read_json_lines(lines, name="long"))
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 3 * MAX_LINE_BYTES


def test_a_file_of_more_than_a_gigabyte_is_not_read(tmp_path):
    with (tmp_path / "a.json").open("wb") as made:
        made.truncate(MAX_FILE_BYTES + 1)
    for read in (lambda path: list(read_json_list(path)), read_object):
        with pytest.raises(UserError, match=r"a\.json: 1,073,741,825 bytes, at most"):
            read(tmp_path / "a.json")


def test_an_object_is_read_or_its_file_named_with_what_to_do(tmp_path):
    (tmp_path / "a.json").write_text('{"limit": Infinity}')
    assert read_object(tmp_path / "a.json") == {"limit": float("inf")}
    (tmp_path / "list.json").write_text("[1]")
    (tmp_path / "folder.json").mkdir()
    wrong = {"none": "is not there", "list": r"must hold an object, not list \[1\]", "folder": "cannot be read: Is a"}
    for name, says in wrong.items():
        with pytest.raises(UserError, match=rf"{name}\.json:? {says}.*; look again$"):
            read_object(tmp_path / f"{name}.json", hint="look again")


@pytest.mark.parametrize(
    ("text", "says"),
    [("a = " + "9" * 5000, "an integer of more than 4300 digits"), ("a = " + "[" * 5000, "nested too deeply")],
    ids=lambda value: str(value)[:40],
)
def test_a_recipe_that_python_cannot_take_is_named(text, says, tmp_path):
    (tmp_path / "run.toml").write_text(text)
    with pytest.raises(UserError, match=rf"run\.toml: .*{says}"):
        read_toml(tmp_path / "run.toml")
    value = text.removeprefix("a = ")
    assert apply_overrides({}, [f"run.name={value}"]) == ({"run": {"name": value}}, [])


def test_a_recipe_may_begin_with_a_byte_order_mark(tmp_path):
    (tmp_path / "run.toml").write_bytes(b"\xef\xbb\xbf[run]\nseed = 3\n")
    assert read_toml(tmp_path / "run.toml") == {"run": {"seed": 3}}


def fuzz(count):
    """Lines with bytes flipped, cut, or put in; returns how many were read and refused."""
    draw, outcomes = random.Random(0), Counter()
    row = json.dumps({"prompt": "a \U0001f600 b", "n": [1, -2.5e3, True, None, {"deep": [[["x\\"]]]}]}).encode()
    parts = [
        b'"',
        b"{",
        b"]",
        b"[" * 300,
        b"\\",
        b"\\ud800",
        b"NaN",
        b"1e999",
        b"9" * 5000,
        b"\xff",
        b"\xef\xbb\xbf",
        b"\x00",
    ]
    for _ in range(count):
        line = bytearray(row)
        for _ in range(draw.choice((1, 1, 2, 5))):
            place = draw.randrange(len(line))
            if draw.random() < 0.5:
                line[place] ^= 1 << draw.randrange(8)
            else:
                line[place : place + draw.randrange(3)] = draw.choice(parts)
        try:
            for where, value in read_json_lines(io.BytesIO(line), name="f"):
                assert where.startswith("f:")
                json.dumps(value, allow_nan=False, ensure_ascii=False).encode()
            outcomes["read"] += 1
        except UserError as error:
            assert str(error).startswith("f:")
            outcomes["refused"] += 1
    return outcomes


def test_damaged_rows_are_read_or_refused():
    assert len(fuzz(500)) == 2


@pytest.mark.slow
def test_100_000_damaged_rows_are_read_or_refused():
    outcomes = fuzz(100_000)
    print(dict(outcomes))
    assert min(outcomes.values()) > 10_000

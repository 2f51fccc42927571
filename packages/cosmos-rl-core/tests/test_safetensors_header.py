"""Headers of safetensors files: each tensor lies in the file and has the size of its shape, or the file is refused."""

import json
import random
import struct
from collections import Counter

import pytest
import torch
from safetensors.torch import save_file

from cosmos_rl_core.checkpoint.safetensors_file import SafetensorsFile, write_tensors
from cosmos_rl_core.errors import UserError
from cosmos_rl_core.storage.folder import Folder
from cosmos_rl_core.storage.safetensors_header import read_header

TENSORS = {
    "a": torch.arange(12.0).reshape(3, 4),
    "b": torch.ones(5, dtype=torch.bfloat16),
    "c": torch.tensor(7),
    "none": torch.zeros(0, 3),
}


def write(path, entries, data=b""):
    text = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def entry(dtype="F32", shape=(2,), offsets=(0, 8)):
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def read_all(path):
    with SafetensorsFile(Folder.at(path.parent), path.name) as file:
        return {name: file.read(name) for name in file.places}


@pytest.mark.parametrize("save", ["ours", "theirs"])
def test_files_of_both_writers_are_read(save, tmp_path):
    if save == "ours":
        write_tensors(Folder.at(tmp_path), "x.safetensors", TENSORS)
    else:
        save_file(TENSORS, tmp_path / "x.safetensors")
    read = read_all(tmp_path / "x.safetensors")
    assert all(torch.equal(read[name], TENSORS[name]) for name in TENSORS)


@pytest.mark.parametrize(
    ("entries", "says"),
    [
        ({"a": entry(shape=[2**40], offsets=[0, 2**42])}, "a is at bytes 0 to 4,398,046,511,104 of 8"),
        ({"a": entry(offsets=[4, 12])}, "a is at bytes 4 to 12 of 8"),
        ({"a": entry(offsets=[8, 0])}, "a is at bytes 8 to 0"),
        ({"a": entry(offsets=[-8, 0])}, "a is at bytes -8 to 0"),
        ({"a": entry(shape=[2**40])}, r"a has 8 bytes, but its shape \[1099511627776\] of F32"),
        ({"a": entry(shape=[2**62] * 60)}, "a has 8 bytes"),
        ({"a": entry(shape=[2**70])}, "a has no valid dtype, shape or data_offsets"),
        ({"a": entry(shape=[1] * 65)}, "a has no valid dtype, shape or data_offsets"),
        ({"a": entry(shape=[True])}, "a has no valid dtype, shape or data_offsets"),
        ({"a": [1]}, "a has no valid dtype, shape or data_offsets"),
        ([1], "its header is not an object"),
        (b"[" * 5000, "its header: lists and objects are nested"),
        (b"{}" + b"9" * 5000, "its header: not valid JSON"),
        (b'{"a": ' + b"9" * 5000 + b"}", "its header: an integer of more than 4300 digits"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_header_that_asks_for_more_than_the_file_has_is_refused(entries, says, tmp_path):
    path = write(tmp_path / "x.safetensors", entries, bytes(8))
    with pytest.raises(UserError, match=rf"x\.safetensors is not a safetensors file \({says}"):
        read_all(path)


@pytest.mark.parametrize("data", [b"", b"\x00" * 7, struct.pack("<Q", 2**62) + b"{}", struct.pack("<Q", 3) + b"{}"])
def test_a_header_longer_than_the_file_is_refused(data, tmp_path):
    (tmp_path / "x.safetensors").write_bytes(data)
    with pytest.raises(UserError, match=r"x\.safetensors is not a safetensors file"):
        read_all(tmp_path / "x.safetensors")


def test_rows_that_are_not_there_are_refused(tmp_path):
    write_tensors(Folder.at(tmp_path), "x.safetensors", TENSORS)
    with SafetensorsFile(Folder.at(tmp_path), "x.safetensors") as file:
        assert torch.equal(file.read("a", first=1, rows=2), TENSORS["a"][1:])
        for first, rows in ((2, 2), (-1, 1), (0, 2**40)):
            with pytest.raises(UserError, match=r"a of shape \[3, 4\] has no rows"):
                file.read("a", first=first, rows=rows)
        with pytest.raises(UserError, match="no tensor z"):
            file.read("z")


def fuzz(path, count):
    """Single bytes of the header changed, in turn and by chance; returns how many files were read and refused."""
    write_tensors(Folder.at(path.parent), path.name, TENSORS)
    whole, draw, outcomes = path.read_bytes(), random.Random(0), Counter()
    end = 8 + struct.unpack("<Q", whole[:8])[0]
    for number in range(count):
        changed = bytearray(whole)
        for _ in range(1 if number < end else draw.choice((1, 2, 3))):
            place = number if number < end else draw.randrange(end)
            changed[place] = draw.choice(b'019{}[],:"F86BTnu\x00\xff \\')
        path.write_bytes(changed)
        try:
            read_all(path)
            outcomes["read"] += 1
        except UserError:
            outcomes["refused"] += 1
    return outcomes


def test_damaged_headers_are_read_or_refused(tmp_path):
    assert len(fuzz(tmp_path / "x.safetensors", 100)) == 2


@pytest.mark.slow
def test_20_000_damaged_headers_are_read_or_refused(tmp_path):
    outcomes = fuzz(tmp_path / "x.safetensors", 20_000)
    print(dict(outcomes))
    assert outcomes["refused"] > 10_000


def test_a_type_that_is_not_known_has_a_place(tmp_path):
    path = write(tmp_path / "x.safetensors", {"a": entry("F4", [16])}, bytes(8))
    with path.open("rb") as file:
        assert read_header(file, name="x")["a"].shape == (16,)
    with pytest.raises(UserError, match="no tensor a of a supported dtype"):
        read_all(path)

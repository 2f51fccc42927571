"""What is computed once stays: whole files, in bounds, whoever writes beside."""

import os
import subprocess
import sys
import time

import pytest
import torch

from cosmos_rl_wfm.data.cache import TensorCache, identity, key_of


def tensors(value=0.0, *, size=4):
    return {"latents": torch.full((size,), value), "mask": torch.tensor([True, False])}


@pytest.fixture
def cache(tmp_path):
    return TensorCache(tmp_path / "cache", max_bytes=2**20)


def aged(cache, key, seconds):
    """Let a file have been read this long ago."""
    then = time.time() - seconds
    os.utime(cache._path(key), (then, then))


def test_tensors_come_back_with_their_types(cache):
    held = {"latents": torch.randn(2, 3).bfloat16(), "mask": torch.tensor([True, False])}
    cache.put("ab12", held)
    read = cache.get("ab12")
    assert read is not None and read.keys() == held.keys()
    assert all(torch.equal(read[name], held[name]) and read[name].dtype == held[name].dtype for name in held)


def test_an_unknown_key_is_none(cache):
    assert cache.get("ffff") is None


def test_a_damaged_file_is_removed_and_computed_again(cache):
    cache.put("ab12", tensors(1.0))
    path = cache._path("ab12")
    path.write_bytes(path.read_bytes()[:-3])
    assert cache.get("ab12") is None
    assert not path.exists()


def test_keys_differ_by_every_part():
    keys = {key_of("a.mp4", [9, 64, 64], "wan"), key_of("a.mp4", [9, 64, 32], "wan"), key_of("a.mp4", [9, 64, 64], "x")}
    assert len(keys) == 3
    assert key_of({"a": 1, "b": 2}) == key_of({"b": 2, "a": 1})


def test_the_identity_of_a_clip_changes_with_its_file_and_its_place_in_it(tmp_path):
    file = tmp_path / "a.mp4"
    file.write_bytes(b"one")
    rows = [{"video": str(file)}, {"video": str(file), "video_at": [0, 2]}, {"video": "mock:3"}]
    before = [key_of(identity(row)) for row in rows]
    assert len(set(before)) == 3
    file.write_bytes(b"other")
    after = [key_of(identity(row)) for row in rows]
    assert [a == b for a, b in zip(before, after)] == [False, False, True]
    with pytest.raises(FileNotFoundError):
        identity({"video": str(tmp_path / "none.mp4")})


def test_the_files_unread_for_longest_make_room(tmp_path):
    cache = TensorCache(tmp_path, max_bytes=2**20)
    for name in ("aa", "bb", "cc"):
        cache.put(name, tensors(size=70_000))  # 280 kB each
        aged(cache, name, 100)
    aged(cache, "bb", 500)
    aged(cache, "aa", 900)
    assert cache.get("aa") is not None  # read: now the youngest
    cache.put("dd", tensors(size=70_000))
    assert [name for name in ("aa", "bb", "cc", "dd") if cache.get(name) is not None] == ["aa", "cc", "dd"]


def test_the_bound_holds_with_many_small_files(tmp_path):
    cache = TensorCache(tmp_path, max_bytes=2**20)
    for number in range(1500):
        cache.put(key_of(number), tensors(size=250))
    assert 0.5 * 2**20 < sum(path.stat().st_size for path in tmp_path.glob("*/*")) <= 2**20


def test_a_value_larger_than_the_bound_is_not_kept(cache):
    cache.put("aa", tensors(size=300_000))
    assert cache.get("aa") is None


def test_what_a_dead_writer_left_is_removed_and_a_live_one_left_alone(cache):
    cache.put("aabb", tensors())
    old, new = (cache._path("aabb").with_name(f".{name}.partial") for name in ("old", "new"))
    for path in (old, new):
        path.write_bytes(b"half")
    os.utime(old, (0, 0))
    other = TensorCache(cache._folder, max_bytes=2**20)  # as after a restart
    other.put("aacc", tensors())
    assert (old.exists(), new.exists()) == (False, True)


WORK = """
import sys
from pathlib import Path

import torch

from cosmos_rl_wfm.data.cache import TensorCache

cache, wrong = TensorCache(Path(sys.argv[1]), max_bytes=2**20), 0
for number in range(120):
    value = float(number * 7 % 10)
    key = f"{number * 7 % 10:04x}"
    if (read := cache.get(key)) is None:
        cache.put(key, {"latents": torch.full((60_000,), value)})
    else:
        wrong += not bool((read["latents"] == value).all())
print(wrong)
"""
"""Writes and reads the same keys as the others, with room for few; prints the damaged reads."""


@pytest.mark.ci
def test_processes_that_write_and_remove_at_once_read_whole_files(tmp_path):
    command = [sys.executable, "-c", WORK, str(tmp_path)]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    assert [process.communicate(timeout=120)[0] for process in processes] == ["0\n"] * 3
    assert not list(tmp_path.glob("*/*.partial"))

"""Text embeddings: read from safetensors and from pickles, which are converted."""

import os
import pickle
import struct

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save, save_file
from safetensors.torch import save_file as save_torch

from cosmos_rl_wfm.data.clips import EmbeddingError, convert, read_embedding


def test_convert_writes_safetensors_beside_a_pickle(tmp_path):
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    source = tmp_path / "a.pickle"
    source.write_bytes(pickle.dumps([array.T.copy().T]))
    assert convert(source) == tmp_path / "a.safetensors"
    np.testing.assert_array_equal(load_file(tmp_path / "a.safetensors")["embedding"], array)


def test_an_embedding_is_read_from_any_kind_of_file_and_a_pickle_is_converted(tmp_path):
    array = np.arange(6, dtype=np.float32).reshape(1, 2, 3)
    (tmp_path / "p.pickle").write_bytes(pickle.dumps([torch.tensor(array)]))
    save_file({"x": array}, tmp_path / "n.safetensors")
    save_torch({"x": torch.tensor(array).bfloat16()}, tmp_path / "b.safetensors")
    for name in ("p.pickle", "n.safetensors", "b.safetensors", "p.safetensors"):
        np.testing.assert_array_equal(read_embedding(str(tmp_path / name), width=3), array[0])


def test_a_pickle_that_changed_is_read_in_place_of_what_was_converted_from_it(tmp_path):
    """Folders list the safetensors file in place of the pickle."""
    source, converted = tmp_path / "a.pickle", str(tmp_path / "a.safetensors")
    for level in (1.0, 2.0, 3.0):
        source.write_bytes(pickle.dumps(np.full((2, 3), level, np.float32)))
        os.utime(source, ns=(int(level), int(level)))  # as of a copy that keeps times
        if level == 1.0:
            read_embedding(str(source))
        assert read_embedding(converted)[0, 0] == level
        assert load_file(converted)["embedding"][0, 0] == level
    source.unlink()
    assert read_embedding(converted)[0, 0] == 3.0


def test_a_file_of_ones_own_beside_a_pickle_is_read_and_stays(tmp_path):
    save_file({"x": np.ones((2, 3), np.float32)}, tmp_path / "a.safetensors")
    (tmp_path / "a.pickle").write_bytes(pickle.dumps(np.zeros((2, 3), np.float32)))
    assert read_embedding(str(tmp_path / "a.pickle")).max() == 0.0
    assert read_embedding(str(tmp_path / "a.safetensors")).min() == 1.0


def test_a_part_of_a_file_is_an_embedding_too(tmp_path):
    data = save({"x": np.ones((2, 4), np.float16)})
    (tmp_path / "shard").write_bytes(b"before" + data + b"after")
    read = read_embedding(str(tmp_path / "shard"), (6, len(data)))
    np.testing.assert_array_equal(read, np.ones((2, 4), np.float32))


@pytest.mark.parametrize(
    ("content", "wrong"),
    [
        (pickle.dumps(np.zeros((2, 5), np.float32)), r"e\.pickle: an embedding of shape \[2, 5\].*\[tokens, 3\]"),
        (pickle.dumps(np.zeros(3, np.float32)), r"shape \[3\]"),
        (pickle.dumps(np.zeros((2, 3), np.int64)), "type int64"),
        (pickle.dumps(np.full((2, 3), np.nan)), "not finite"),
        (pickle.dumps(["text"]), "holds no array"),
        (pickle.dumps(print), r"asks for builtins\.print"),
        (struct.pack("<Q", 900) + b"{}", "no safetensors file"),
        (save({"x": np.zeros((2, 3), np.int32)}), "of type I32"),
    ],
)
def test_an_embedding_that_cannot_be_taken_is_a_fault_of_its_row(content, wrong, tmp_path):
    (tmp_path / "e.pickle").write_bytes(content)
    with pytest.raises(EmbeddingError, match=wrong):
        read_embedding(str(tmp_path / "e.pickle"), width=3)


def test_a_missing_embedding_is_a_fault_of_its_row(tmp_path):
    with pytest.raises(EmbeddingError, match=r"none\.pickle: cannot be read: No such file"):
        read_embedding(str(tmp_path / "none.pickle"))

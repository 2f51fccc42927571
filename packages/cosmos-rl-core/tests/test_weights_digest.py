"""The digest of a file of weights: what it sees, and how little it reads."""

import io

import numpy as np
import pytest
from safetensors.numpy import save_file

from cosmos_rl_core.storage.weights_digest import SAMPLE_BYTES, base_digests, weights_digest

SHAPES = {"embedding": (4096, 16), "norm": (16,), "head": (16, 4096)}


@pytest.fixture
def tensors():
    rng = np.random.default_rng(0)
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in SHAPES.items()}


@pytest.mark.parametrize("changed", SHAPES)
def test_a_tensor_with_other_values_changes_it(tmp_path, tensors, changed):
    save_file(tensors, tmp_path / "before.safetensors")
    save_file({**tensors, changed: tensors[changed] + 1}, tmp_path / "after.safetensors")
    before, after = (weights_digest(tmp_path / f"{name}.safetensors") for name in ("before", "after"))
    assert before != after


def test_a_copy_has_the_same_and_another_name_or_type_of_a_tensor_changes_it(tmp_path, tensors):
    save_file(tensors, tmp_path / "first.safetensors")
    save_file(dict(reversed(tensors.items())), tmp_path / "copy.safetensors")
    save_file({f"{name}_": tensor for name, tensor in tensors.items()}, tmp_path / "named.safetensors")
    save_file({name: tensor.view(np.int32) for name, tensor in tensors.items()}, tmp_path / "typed.safetensors")
    first, copy, named, typed = (
        weights_digest(tmp_path / f"{name}.safetensors") for name in ("first", "copy", "named", "typed")
    )
    assert first == copy
    assert len({first, named, typed}) == 3


def test_it_reads_a_bounded_part_of_each_tensor(tmp_path, tensors, monkeypatch):
    path = tmp_path / "model.safetensors"
    save_file(tensors, path)
    read = []

    class Counted(io.FileIO):
        def read(self, size=-1):
            data = super().read(size)
            read.append(len(data))
            return data

    monkeypatch.setattr(type(path), "open", lambda self, mode: Counted(self))
    weights_digest(path)
    header = path.stat().st_size - sum(tensor.nbytes for tensor in tensors.values())
    assert sum(read) <= 2 * header + len(SHAPES) * SAMPLE_BYTES


def test_only_the_base_of_adapters_has_digests_and_files_of_folders_have_their_paths(tmp_path, tensors):
    (tmp_path / "transformer").mkdir()
    save_file(tensors, tmp_path / "transformer" / "diffusion.safetensors")
    model = {"path": str(tmp_path), "lora": {"rank": 4}}
    assert list(base_digests({"model": model})) == ["transformer/diffusion.safetensors"]
    assert base_digests({"model": {**model, "lora": None}}) == {}
    assert base_digests({"model": {**model, "path": str(tmp_path / "elsewhere")}}) == {}

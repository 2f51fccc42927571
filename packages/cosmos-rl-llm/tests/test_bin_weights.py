"""Models with pytorch_model.bin alone: converted once, and the same model."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file

from cosmos_rl_core.errors import UserError
from cosmos_rl_llm.model.causal_lm import load_model
from cosmos_rl_llm.tiny import write_tiny_model


def as_bin(directory, *, files):
    """Replace the safetensors of a model by .bin files, as transformers 4 wrote them."""
    weights = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    if files == 1:
        torch.save(weights, directory / "pytorch_model.bin")
        return weights
    placed = {key: f"pytorch_model-{place % files + 1:05d}-of-{files:05d}.bin" for place, key in enumerate(weights)}
    for name in set(placed.values()):
        torch.save({key: weights[key] for key in weights if placed[key] == name}, directory / name)
    (directory / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": placed}))
    return weights


@pytest.mark.parametrize("files", [1, 3])
def test_a_model_of_bin_files_is_converted_once_and_loads(tmp_path, files, capfd):
    base = write_tiny_model(tmp_path / "base")
    weights = as_bin(base, files=files)
    loaded = load_model(base, dtype=torch.float32).state_dict()
    for name, tensor in weights.items():
        torch.testing.assert_close(loaded[name], tensor, rtol=0, atol=0)
    assert capfd.readouterr().err.count("is converted into") == files
    times = {file: file.stat().st_mtime_ns for file in base.glob("*.safetensors")}
    assert len(times) == files
    load_model(base, dtype=torch.float32)
    assert {file: file.stat().st_mtime_ns for file in base.glob("*.safetensors")} == times


def test_a_conversion_that_was_interrupted_is_made_again(tmp_path):
    base = write_tiny_model(tmp_path / "base")
    as_bin(base, files=3)
    (base / "model-00001-of-00003.safetensors").write_bytes(b"half")
    load_model(base, dtype=torch.float32)


@pytest.mark.parametrize("name", ["../other.bin", "/etc/weights.bin", "weights.safetensors"])
def test_an_index_that_names_other_files_is_refused(tmp_path, name):
    base = write_tiny_model(tmp_path / "base")
    as_bin(base, files=3)
    (base / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": {"w": name}}))
    with pytest.raises(UserError, match=r"is no \.bin file beside it"):
        load_model(base, dtype=torch.float32)

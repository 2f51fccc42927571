"""Files of torch.save: the tensors of state dicts, without torch.load."""

from __future__ import annotations

import pickle
import zipfile

import numpy as np
import pytest
import torch

from cosmos_rl_core.errors import UserError
from cosmos_rl_core.storage.torch_archive import read_torch_archive


def test_tensors_of_each_dtype_shape_and_stride_are_those_of_torch(tmp_path):
    base = torch.arange(24.0).reshape(4, 6)
    network = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.LayerNorm(2)).state_dict()  # has _metadata
    extra = {
        "half": base.half(),
        "bfloat16": base.bfloat16(),
        "integers": torch.arange(5),
        "flags": torch.tensor([True, False]),
        "transposed": base.T,
        "part": base[1:3, ::2],
        "tied": network["0.weight"],
        "scalar": torch.tensor(3.5),
        "empty": torch.zeros(0, 4),
        "parameter": torch.nn.Parameter(base.clone()),
    }
    network.update(extra)
    torch.save(network, tmp_path / "weights.bin")
    arrays = read_torch_archive(tmp_path / "weights.bin")
    assert list(arrays) == list(network)
    for name, tensor in network.items():
        np.testing.assert_array_equal(arrays[name].copy(), tensor.detach().float().numpy(), err_msg=name)


class Evil:
    def __reduce__(self):
        return print, ("called",)


@pytest.mark.parametrize("content", [{"w": Evil()}, Evil()])
def test_a_pickle_that_calls_anything_is_refused(tmp_path, capsys, content):
    torch.save(content, tmp_path / "weights.bin")
    with pytest.raises(UserError, match=r"refused: it asks for __builtin__\.print"):
        read_torch_archive(tmp_path / "weights.bin")
    assert capsys.readouterr().out == ""


def test_what_is_no_state_dict_is_refused(tmp_path):
    torch.save({"model": {"w": torch.zeros(2)}}, tmp_path / "nested.bin")
    with pytest.raises(UserError, match="no state dict"):
        read_torch_archive(tmp_path / "nested.bin")
    torch.save({"w": torch.zeros(2)}, tmp_path / "old.bin", _use_new_zipfile_serialization=False)
    with pytest.raises(UserError, match=r"torch 1\.6 or later"):
        read_torch_archive(tmp_path / "old.bin")


def test_a_file_of_tensors_that_share_a_storage_a_thousand_times_is_refused(tmp_path):
    shared = torch.zeros(4096)
    torch.save({f"w{number}": shared for number in range(1000)}, tmp_path / "bomb.bin")
    with pytest.raises(UserError, match="share the same bytes"):
        read_torch_archive(tmp_path / "bomb.bin")


@pytest.mark.parametrize("key, damage", [("data/0", b"x"), ("data.pkl", b"")])
def test_members_that_do_not_fit_the_pickle_are_refused(tmp_path, key, damage):
    torch.save({"w": torch.zeros(8)}, tmp_path / "weights.bin")
    with (
        zipfile.ZipFile(tmp_path / "weights.bin") as archive,
        zipfile.ZipFile(tmp_path / "damaged.bin", "w") as written,
    ):
        for info in archive.infolist():
            written.writestr(info.filename, damage if info.filename.endswith(key) else archive.read(info))
    with pytest.raises(UserError, match=r"damaged|refused"):
        read_torch_archive(tmp_path / "damaged.bin")


def test_a_compressed_member_is_refused(tmp_path):
    torch.save({"w": torch.zeros(8)}, tmp_path / "weights.bin")
    with (
        zipfile.ZipFile(tmp_path / "weights.bin") as archive,
        zipfile.ZipFile(tmp_path / "small.bin", "w", zipfile.ZIP_DEFLATED) as written,
    ):
        for info in archive.infolist():
            written.writestr(info.filename, archive.read(info))
    with pytest.raises(UserError, match="compressed member"):
        read_torch_archive(tmp_path / "small.bin")


def test_a_pickle_without_an_archive_is_refused(tmp_path):
    (tmp_path / "weights.bin").write_bytes(pickle.dumps({"w": 1}))
    with pytest.raises(UserError, match=r"torch 1\.6 or later"):
        read_torch_archive(tmp_path / "weights.bin")

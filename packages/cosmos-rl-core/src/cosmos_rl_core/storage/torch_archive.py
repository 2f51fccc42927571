"""Reads the tensors of a file of torch.save: pytorch_model.bin of older models. No torch.

    zip: NAME/data.pkl, a pickle that names storages | NAME/data/0, NAME/data/1, ..., their bytes, not compressed

`pickles` reads the pickle in a child process; the storages are views of the mapped file, so that a tensor is read when
it is used. The format is that of torch/serialization.py.
"""

from __future__ import annotations

import struct
import zipfile
from pathlib import Path

import numpy as np

from cosmos_rl_core.errors import UserError
from cosmos_rl_core.storage.pickles import Array, DamagedPickle, ForbiddenPickle, array_in, run_unpickle

MAX_SHARING = 4
"""Times that the tensors together may be larger than the file: tied ones share a storage."""
_LOCAL_HEADER = struct.Struct("<4s22xHH")
"""Of a member of a zip: its magic, then the lengths of its name and of its extra field."""


def read_torch_archive(path: Path) -> dict[str, Array]:
    """Return the tensors of a state dict by name, as views of the mapped file.

    Raises:
        UserError: it is damaged, of a version of torch before 1.6, no flat dict of tensors, or asks for anything else.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            storages = _Storages(path, archive)
            pickled = archive.read(storages.member("data.pkl"))
        answer, _ = run_unpickle("archive", pickled)
        arrays = {
            name: array_in(storages.bytes_of(f"data/{tensor.storage}"), tensor)
            for name, tensor in (answer.arrays or {}).items()
        }
    except ForbiddenPickle as refused:
        raise UserError(f"{path}: refused: it asks for {refused}; only tensors are read") from None
    except (DamagedPickle, LookupError, OSError, ValueError, struct.error, zipfile.BadZipFile) as error:
        cause = f"{type(error).__name__}: {str(error)[:200]}"
        raise UserError(f"{path} is damaged, or no file of torch.save of torch 1.6 or later ({cause})") from None
    if answer.arrays is None:
        raise UserError(f"{path} has no state dict, a flat dict of tensors")
    if sum(array.view.nbytes for array in arrays.values()) > MAX_SHARING * path.stat().st_size:
        raise UserError(f"{path}: refused: its tensors share the same bytes more than {MAX_SHARING} times")
    return arrays


class _Storages:
    """The storages of an archive, each a view of the file."""

    def __init__(self, path: Path, archive: zipfile.ZipFile) -> None:
        self._bytes = np.memmap(path, np.uint8, mode="c")  # torch wants views that it may write to; the file stays
        self._members = {info.filename.partition("/")[2]: info for info in archive.infolist()}
        order = self._members.get("byteorder")
        if order is not None and archive.read(order) != b"little":
            raise ForbiddenPickle("big-endian storages")

    def member(self, name: str) -> zipfile.ZipInfo:
        """Return a member by its name in the archive. Raises KeyError without one."""
        member = self._members[name]
        if member.compress_type != zipfile.ZIP_STORED:
            raise ForbiddenPickle("a compressed member")
        return member

    def bytes_of(self, name: str) -> np.ndarray:
        """Return the bytes of a member, uint8."""
        member = self.member(name)
        magic, name_length, extra_length = _LOCAL_HEADER.unpack_from(self._bytes.data, member.header_offset)
        if magic != b"PK\x03\x04":
            raise ForbiddenPickle("a storage outside of the archive")
        start = member.header_offset + _LOCAL_HEADER.size + name_length + extra_length
        content = self._bytes[start : start + member.file_size]
        if len(content) != member.file_size:
            raise ForbiddenPickle("a storage that ends outside of the file")
        return content

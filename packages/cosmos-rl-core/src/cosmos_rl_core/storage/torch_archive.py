"""Reads the tensors of a file of torch.save: pytorch_model.bin of older models. No torch, and no pickle is run.

    zip: NAME/data.pkl, a pickle that names storages | NAME/data/0, NAME/data/1, ..., their bytes, not compressed

`pickles` follows the pickle's operations; its storages are views of the mapped file, so that a tensor is read when it
is used. The format is that of torch/serialization.py.
"""

from __future__ import annotations

import io
import struct
import zipfile
from pathlib import Path

import numpy as np

from cosmos_rl_core.errors import UserError
from cosmos_rl_core.storage.pickles import (
    FAULTS,
    STORAGES,
    Array,
    Budget,
    ForbiddenPickle,
    PickleMachine,
    StandIn,
    Storage,
)

OPERATIONS_PER_STORAGE = 400
"""Of the pickle: a tensor takes about 60, and a storage may have several tensors."""
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
        budget = Budget(num_bytes=2 * len(pickled), operations=1000 + OPERATIONS_PER_STORAGE * len(storages))
        content = PickleMachine(budget, storages=storages.find).run(io.BytesIO(pickled))
    except ForbiddenPickle as refused:
        raise UserError(f"{path}: refused: it asks for {refused}; only tensors are read") from None
    except (OSError, zipfile.BadZipFile, *FAULTS) as error:
        cause = f"{type(error).__name__}: {str(error)[:200]}"
        raise UserError(f"{path} is damaged, or no file of torch.save of torch 1.6 or later ({cause})") from None
    if type(content) is not dict or not all(isinstance(tensor, Array) for tensor in content.values()):
        raise UserError(f"{path} has no state dict, a flat dict of tensors")
    if sum(tensor.view.nbytes for tensor in content.values()) > MAX_SHARING * path.stat().st_size:
        raise UserError(f"{path}: refused: its tensors share the same bytes more than {MAX_SHARING} times")
    return content


class _Storages:
    """The storages of an archive, each a view of the file."""

    def __init__(self, path: Path, archive: zipfile.ZipFile) -> None:
        self._bytes = np.memmap(path, np.uint8, mode="c")  # torch wants views that it may write to; the file stays
        self._members = {info.filename.partition("/")[2]: info for info in archive.infolist()}
        order = self._members.get("byteorder")
        if order is not None and archive.read(order) != b"little":
            raise ForbiddenPickle("big-endian storages")

    def __len__(self) -> int:
        return len(self._members)

    def member(self, name: str) -> zipfile.ZipInfo:
        """Return a member by its name in the archive. Raises KeyError without one."""
        return self._members[name]

    def find(self, kind: StandIn, key: str) -> Storage:
        """Return a storage by its key in the pickle."""
        member = self._members[f"data/{key}"]
        if member.compress_type != zipfile.ZIP_STORED:
            raise ForbiddenPickle("a compressed storage")
        magic, name_length, extra_length = _LOCAL_HEADER.unpack_from(self._bytes.data, member.header_offset)
        if magic != b"PK\x03\x04":
            raise ForbiddenPickle("a storage outside of the archive")
        start = member.header_offset + _LOCAL_HEADER.size + name_length + extra_length
        dtype = STORAGES[kind.name.removeprefix("torch.")]
        is_bfloat16 = dtype == "bfloat16"
        element = np.dtype("<u2" if is_bfloat16 else dtype)
        data = self._bytes[start : start + member.file_size]
        if len(data) != member.file_size or member.file_size % element.itemsize:
            raise ForbiddenPickle("a storage that ends outside of the file")
        return Storage(np.frombuffer(data, element), is_bfloat16)

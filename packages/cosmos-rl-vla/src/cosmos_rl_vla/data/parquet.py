"""Reads parquet tables, with errors that name file and column. pyarrow is imported on first use."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from cosmos_rl_core.errors import UserError

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq

AGAIN = "record it, or download it, again"


def open_parquet(path: Path) -> pq.ParquetFile:
    """Open a file. Raises UserError if it does not exist or is incomplete."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return pq.ParquetFile(path)
    except FileNotFoundError:
        raise UserError(f"{path} does not exist: the dataset is incomplete; {AGAIN}") from None
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"{path} cannot be read, as after an interruption: {error}; {AGAIN}") from error


def read_parquet(path: Path, columns: Sequence[str]) -> pa.Table:
    """Read some columns of a file. Raises UserError if they are missing or damaged."""
    import pyarrow as pa

    with open_parquet(path) as file:
        present = file.schema_arrow.names
        if missing := [name for name in columns if name not in present]:
            raise UserError(f"{path} has no column {missing[0]!r}; it has {', '.join(present)}")
        try:
            return file.read(list(columns))
        except (pa.ArrowException, OSError) as error:
            raise UserError(f"{path} is damaged: {error}; {AGAIN}") from error


def vectors(table: pa.Table, column: str, *, size: int, origin: Path) -> np.ndarray:
    """Return a column of numbers, or of lists of `size` numbers, as float32 [N, size]; null numbers are NaN.

    Raises UserError for anything else.
    """
    import pyarrow as pa

    array: Any = table.column(column).combine_chunks()
    list_sizes = _list_sizes(array)
    flat: Any = array if list_sizes is None else array.flatten()
    if not (pa.types.is_floating(flat.type) or pa.types.is_integer(flat.type) or pa.types.is_boolean(flat.type)):
        raise UserError(f"{origin}: column {column!r} holds {flat.type}, not numbers")
    if (list_sizes or {1}) != {size}:
        sizes = " or ".join(map(str, sorted(list_sizes or {1})))
        raise UserError(f"{origin}: column {column!r} has {sizes} numbers per frame, meta/info.json has {size}")
    return flat.cast(pa.float32(), safe=False).to_numpy(zero_copy_only=False).reshape(len(table), size)


def whole_numbers(table: pa.Table, column: str, *, origin: Path) -> np.ndarray:
    """Return a column of integers, or of lists of one, as int64 [N]. Raises UserError for nulls and other types."""
    import pyarrow as pa

    array: Any = table.column(column).combine_chunks()
    flat: Any = array if _list_sizes(array) is None else array.flatten()
    if not pa.types.is_integer(flat.type) or flat.null_count or len(flat) != len(table):
        raise UserError(f"{origin}: column {column!r} holds {array.type}, not one integer per frame")
    return flat.to_numpy(zero_copy_only=False).astype(np.int64)


def _list_sizes(array: Any) -> set[int] | None:
    """Return the sizes of an array's lists, 0 for a null; None for another type."""
    import pyarrow as pa

    if pa.types.is_fixed_size_list(array.type):
        return {array.type.list_size, 0} if array.null_count else {array.type.list_size}
    if pa.types.is_list(array.type) or pa.types.is_large_list(array.type):
        return set(np.diff(array.offsets.to_numpy()).tolist())
    return None

"""Plain-text tables."""

from __future__ import annotations

from collections.abc import Sequence


def table(rows: Sequence[Sequence[object]], *, header: Sequence[str] = ()) -> str:
    """Return rows as left-aligned columns two spaces apart, under an upper-case header."""
    cells = [[str(cell) for cell in row] for row in rows]
    if header:
        cells.insert(0, [title.upper() for title in header])
    widths = [max(len(row[column]) for row in cells) for column in range(len(cells[0]))] if cells else []
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in cells]
    return "\n".join(line.rstrip() for line in lines)

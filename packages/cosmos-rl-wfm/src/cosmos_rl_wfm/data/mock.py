"""Rows, clips and embeddings that need no files: a coloured gradient that moves in the direction of its caption."""

from __future__ import annotations

from typing import Any

import numpy as np

from cosmos_rl_wfm.data.config import WFMDataConfig

SCHEME = "mock:"

COLOURS = {"red": (1.0, 0.2, 0.2), "green": (0.2, 1.0, 0.2), "blue": (0.2, 0.2, 1.0), "grey": (0.8, 0.8, 0.8)}
DIRECTIONS = {"right": (0, 1), "left": (0, -1), "down": (1, 0), "up": (-1, 0)}
"""Words and (rows, columns) of motion per frame."""

FPS = 16.0


def mock_rows(config: WFMDataConfig) -> list[dict[str, Any]]:
    """Return `config.mock.rows` rows whose `video` and `text_embedding` are "mock:NUMBER"."""
    return [
        {
            "caption": mock_caption(index),
            "key": f"mock-{index:06d}",
            "fps": config.fps or FPS,
            "video": f"{SCHEME}{index}",
            "text_embedding": f"{SCHEME}{index}" if config.mock.embedding_tokens else "",
        }
        for index in range(config.mock.rows)
    ]


def mock_index(location: str) -> int | None:
    """Return the number of a mock row's clip, or None for a path or URL."""
    return int(location.removeprefix(SCHEME)) if location.startswith(SCHEME) else None


def mock_caption(index: int) -> str:
    colour, direction = _words(index)
    return f"a {colour} gradient moves {direction}"


def mock_clip(index: int, *, frames: int, height: int, width: int) -> np.ndarray:
    """Return uint8 [F, H, W, 3]: brightness rises and falls once over the image and moves 1/16 of it a frame."""
    colour, direction = _words(index)
    down, right = DIRECTIONS[direction]
    length = height if down else width
    along = np.arange(length) / length
    moved = along[None] - (down or right) * np.arange(frames)[:, None] / 16 + index / 7
    wave = 1 - np.abs(2 * (moved % 1) - 1)  # [F, length], a triangle from 0 to 1
    image = wave[:, :, None] if down else wave[:, None, :]
    bright = np.broadcast_to(image, (frames, height, width))[..., None] * np.array(COLOURS[colour])
    return (255 * bright).astype(np.uint8)


def mock_embedding(index: int, *, tokens: int, width: int) -> np.ndarray:
    """Return float32 [L, E]: the same for the same caption, of unit variance."""
    captions = len(COLOURS) * len(DIRECTIONS)
    return np.random.default_rng(index % captions).standard_normal((tokens, width), np.float32)


def _words(index: int) -> tuple[str, str]:
    colours, directions = list(COLOURS), list(DIRECTIONS)
    return colours[index % len(colours)], directions[index // len(colours) % len(directions)]

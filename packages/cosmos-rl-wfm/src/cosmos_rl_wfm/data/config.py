"""The [data] section of a world-model recipe."""

from __future__ import annotations

import re
from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from cosmos_rl_core.settings.base import Strict
from cosmos_rl_wfm.samplers import DensityName

Start = Literal["random", "centre", "first"]
"""Start of a clip in a longer video."""

Kind = Literal["auto", "folder", "prompts", "webdataset", "mock"]

HEIGHT_BY_WIDTH = re.compile(r"([1-9]\d*)x([1-9]\d*)")


class SizeSection(Strict):
    """[data.size]: size of trained and generated clips."""

    frames: int = Field(ge=1)
    """Frames of a clip; 1 for images."""
    height: int = Field(ge=1)
    """Pixels."""
    width: int = Field(ge=1)
    """Pixels."""


class ClipNoiseSection(Strict):
    """[data.noise]: the times at which real clips are noised."""

    density: DensityName = "logit_normal"
    """"uniform", or the sigmoid of a normal sample; the model's shift is applied afterwards."""
    mean: float = 0.0
    """Mean of the normal distribution."""
    std: float = Field(default=1.0, gt=0)
    """Standard deviation of the normal distribution."""
    weighting: Literal["uniform", "edm"] = "uniform"
    """Weight of the loss at time t: 1, or t^2 + (1 - t)^2 as in Cosmos and DDRL."""


class MockSection(Strict):
    """[data.mock]: generated rows of kind = "mock", without files."""

    rows: int = Field(default=64, ge=1)
    """Number of rows."""
    embedding_tokens: int = Field(default=0, ge=0)
    """Tokens of the text embedding of a row; 0 leaves the captions to the model's text encoder."""
    embedding_width: int = Field(default=64, ge=1)
    """Width of a token's embedding."""


class WFMDataConfig(Strict):
    """[data]: the source of captions and clips, and the rules for cutting a clip out of a video."""

    path: str = ""
    """A folder, a list of prompts (.jsonl, .json, .txt), or tar shards such as "s3://bucket/clips-{000..010}.tar"."""
    rows: str | None = Field(default=None, min_length=1)
    """Instead of `path`, Python's "module:attribute": a list of rows as in a list of prompts, or a function without
    arguments that returns one."""
    kind: Kind = "auto"
    """Kind of the data at `path`; "auto" infers it from the path."""
    size: SizeSection
    """Size of a clip."""
    fps: float | None = Field(default=None, gt=0)
    """Frames per second of a clip, selected by timestamp; without it every `stride`th frame of the video."""
    stride: int = Field(default=1, ge=1)
    """Distance between a clip's frames in frames of the video, if `fps` is not set."""
    start: Start = "random"
    """Start of a clip in a longer video: at random, so that the clip is centred, or at the first frame."""
    buckets: tuple[str, ...] = ()
    """Heights by widths, ["480x832", "832x480"]: a clip gets the closest of these instead of the shape in `size`."""
    caption_column: str = Field(default="caption", min_length=1)
    """Column with the caption, in lists of prompts and JSON files."""
    caption_dropout: float = Field(default=0.0, ge=0, lt=1)
    """Fraction of real clips trained without their captions, for guidance."""
    text_embeddings: Literal["auto", "off"] = "auto"
    """Embeddings stored beside the captions: used if present, or ignored."""
    limit: int | None = Field(default=None, ge=1)
    """Read only the first rows."""
    noise: ClipNoiseSection = ClipNoiseSection()
    """Noise of real clips."""
    mock: MockSection = MockSection()
    """Rows of kind = "mock"."""
    workers: int = Field(default=4, ge=1)
    """Threads that read and decode a step's clips, in each process that trains."""
    cache_path: str | None = None
    """Folder of cached latents and shard indexes; without it ~/.cache/cosmos-rl."""
    cache_bytes: int = Field(default=50 * 2**30, ge=2**20)
    """Maximum size of the latents in it; the least recently used are deleted first."""
    timeout_s: float = Field(default=60.0, gt=0)
    """Timeout of a request to an object store."""

    @field_validator("buckets")
    @classmethod
    def _buckets_are_shapes(cls, buckets: tuple[str, ...]) -> tuple[str, ...]:
        for bucket in buckets:
            if not HEIGHT_BY_WIDTH.fullmatch(bucket):
                raise ValueError(f'{bucket!r} is no height by width in pixels; write "480x832"')
        return buckets

    @model_validator(mode="after")
    def _keys_fit_together(self) -> Self:
        if self.kind == "mock" and self.path:
            raise ValueError('kind = "mock" reads no files; remove path, or kind')
        if self.rows is not None and (self.path or self.kind != "auto"):
            raise ValueError("rows replaces path and kind; remove those, or rows")
        if self.kind != "mock" and not self.path and self.rows is None:
            raise ValueError('path is missing: set it to the location of the data, or set kind = "mock"')
        if self.fps is not None and self.stride != 1:
            raise ValueError("fps and stride both select the frames; remove one")
        return self

    @property
    def sizes(self) -> tuple[tuple[int, int], ...]:
        """Heights and widths of real clips: the buckets, or that of `size`."""
        if not self.buckets:
            return ((self.size.height, self.size.width),)
        return tuple((int(height), int(width)) for height, width in (bucket.split("x") for bucket in self.buckets))

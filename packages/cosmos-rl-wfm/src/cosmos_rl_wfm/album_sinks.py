"""Where an album shows its pages beside the run directory: TensorBoard, Weights & Biases."""

from __future__ import annotations

import time
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

from cosmos_rl_core.errors import UserError


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """An animation of one group."""

    gif: bytes
    width: int
    """Pixels."""
    height: int
    caption: str


class AlbumSink(Protocol):
    """Takes pages.

    sink.show(step, "samples/0", page)      # once a group, by its place in the step
    """

    def show(self, step: int, tag: str, page: Page) -> None:
        """Show a page."""
        ...

    def close(self) -> None:
        """Make what was shown durable."""
        ...


class TensorBoardAlbum:
    """Animations among the images of `tensorboard --logdir`, which plays GIF as it is; neither torch nor moviepy."""

    def __init__(self, run_dir: Path) -> None:
        _package("tensorboard", "cosmos-rl-core[tensorboard]")
        self._event_pb2 = import_module("tensorboard.compat.proto.event_pb2")
        self._summary_pb2 = import_module("tensorboard.compat.proto.summary_pb2")
        writer = import_module("tensorboard.summary.writer.event_file_writer")
        self._writer: Any = writer.EventFileWriter(str(run_dir / "tensorboard"), filename_suffix=".album")

    def show(self, step: int, tag: str, page: Page) -> None:
        image = self._summary_pb2.Summary.Image(
            encoded_image_string=page.gif, width=page.width, height=page.height, colorspace=3
        )
        value = self._summary_pb2.Summary.Value(tag=tag, image=image)
        summary = self._summary_pb2.Summary(value=[value])
        self._writer.add_event(self._event_pb2.Event(wall_time=time.time(), step=step, summary=summary))

    def close(self) -> None:
        self._writer.close()


class WandbAlbum:
    """Animations in a Weights & Biases run of their own, named after the run directory."""

    def __init__(self, run_dir: Path) -> None:
        self._wandb: Any = _package("wandb", "cosmos-rl-core[wandb]")
        self._directory = run_dir / "wandb_album"
        self._directory.mkdir(parents=True, exist_ok=True)
        self._run = self._wandb.init(
            project="cosmos-rl", name=f"{run_dir.name}-album", dir=str(run_dir), resume="allow"
        )

    def show(self, step: int, tag: str, page: Page) -> None:
        path = self._directory / f"{tag.replace('/', '_')}_{step:06d}.gif"  # wandb takes animations as files alone
        path.write_bytes(page.gif)
        self._run.log({tag: self._wandb.Video(str(path), caption=page.caption, format="gif")}, step=step)

    def close(self) -> None:
        self._run.finish()


def _package(module: str, distribution: str) -> ModuleType:
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module:
            raise
        raise UserError(
            f"pages in {module} need a package that is not installed: pip install '{distribution}'"
        ) from error

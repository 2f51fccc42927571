"""Base of rewards with a transformers model: its name, device and dtype, errors of loading, and use by threads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, ClassVar, Generic, Literal, TypeVar

from pydantic import Field, field_validator

from cosmos_rl_core.errors import UserError
from cosmos_rl_core.settings.base import Strict

if TYPE_CHECKING:
    import torch


T = TypeVar("T")


class Pretrained(Strict):
    """A model by name, with its device, dtype and batch size."""

    loads_model: ClassVar[bool] = True

    model: str
    """Id on the Hugging Face hub, or a folder."""
    device: str = "auto"
    """Device, such as "cuda:1" or "cpu"; "auto" is the current GPU, or the CPU if there is none."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Dtype of the model."""
    num_frames: int = Field(default=8, ge=1)
    """Evenly spaced input frames of a clip; all frames of a shorter clip."""
    batch_size: int = Field(default=32, ge=1)
    """Maximum samples in one pass: frames for a CLIP, clips for a VLM."""

    @field_validator("model")
    @classmethod
    def _exists(cls, model: str) -> str:
        if model.startswith(("/", "./", "../", "~")) and not Path(model).expanduser().is_dir():
            raise ValueError("there is no such folder; a model of the hub is written as owner/name")
        return model

    @property
    def source(self) -> str:
        """Argument of `from_pretrained`."""
        return str(Path(self.model).expanduser()) if self.model.startswith("~") else self.model

    def torch_device(self) -> torch.device:
        """Return the device `device` means on this machine."""
        import torch

        if self.device == "auto":
            return torch.device("cuda" if torch.cuda.is_available() else "cpu")
        return torch.device(self.device)

    def load(self, make: Callable[[str], T]) -> T:
        """Return `make(source)`.

        Raises:
            UserError: there is no such model, or `make` does not support its kind.
        """
        try:
            return make(self.source)
        except (
            OSError,
            ValueError,
            ImportError,
        ) as error:  # unknown names and kinds, missing parts
            raise UserError(f"model = {self.model!r} cannot be loaded: {str(error).strip()[:500]}") from error


class Exclusive(Generic[T]):
    """Makes a value at its first use, and gives one thread at a time access to it. Retries `make` after a failure.

    model = Exclusive(load)         # nothing is loaded
    with model.use() as loaded:     # loads; others wait: tokenizers and readers are not safe for two threads at once
        ...
    """

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._turn = Lock()
        self._built: tuple[T] | None = None

    @contextmanager
    def use(self) -> Iterator[T]:
        with self._turn:
            if self._built is None:
                self._built = (self._make(),)
            yield self._built[0]

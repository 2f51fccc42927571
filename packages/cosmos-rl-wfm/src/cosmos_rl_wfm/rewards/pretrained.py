"""What rewards with a model of transformers share: its name, its place, and a clear word when it is not there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeVar

from pydantic import Field, field_validator

from cosmos_rl_core.errors import UserError
from cosmos_rl_core.settings.base import Strict

if TYPE_CHECKING:
    import torch

T = TypeVar("T")


class Pretrained(Strict):
    """A model by name, and how it is run."""

    model: str
    """Id on the Hugging Face hub, or a folder."""
    device: str = "auto"
    """Where it runs, such as "cuda:1" or "cpu"; "auto" is the current GPU, or the CPU where there is none."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Type it computes in."""
    num_frames: int = Field(default=8, ge=1)
    """Frames of a clip it is shown, evenly spaced; a shorter clip shows all it has."""
    batch_size: int = Field(default=32, ge=1)
    """Most samples in one pass: frames of a CLIP, clips of a VLM."""

    @field_validator("model")
    @classmethod
    def _is_there(cls, model: str) -> str:
        if model.startswith(("/", "./", "../", "~")) and not Path(model).expanduser().is_dir():
            raise ValueError("there is no such folder; a model of the hub is written as owner/name")
        return model

    @property
    def source(self) -> str:
        """What `from_pretrained` takes."""
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
            UserError: there is no such model, or it is of a kind that `make` does not know.
        """
        try:
            return make(self.source)
        except (OSError, ValueError, ImportError) as error:  # how transformers reports names, kinds and missing parts
            raise UserError(f"model = {self.model!r} cannot be loaded: {str(error).strip()[:500]}") from error

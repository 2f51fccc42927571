"""The files beside a checkpoint that say how its pictures and videos are processed.

    preprocessor_config.json           picture                   processor_config.json, section "image_processor"
    video_preprocessor_config.json     video                     processor_config.json, section "video_processor"

Image processors are made in their form without torchvision, from the name in the file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cosmos_rl_core.errors import UserError

NAMES = ("preprocessor_config.json", "video_preprocessor_config.json", "processor_config.json")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessorFiles:
    """The processing of one checkpoint of the family `kind`."""

    source: str
    """The checkpoint's directory, for messages."""
    kind: str
    """The model_type of its configuration, for messages."""
    texts: Mapping[str, str]
    """Text of each of NAMES that exists."""

    @classmethod
    def read(cls, source: str, *, kind: str) -> ProcessorFiles:
        directory = Path(source)
        paths = (directory / name for name in NAMES)
        texts = {path.name: path.read_text(encoding="utf-8") for path in paths if path.is_file()}
        return cls(source=source, kind=kind, texts=texts)

    def section(self, name: str, key: str) -> Mapping[str, Any]:
        """Return a processor's section of the file that newer checkpoints have for all, or its own file."""
        return self._parsed("processor_config.json").get(key) or self._parsed(name)

    def image_processor(self, *names: str) -> Any:
        """Make the image processor, of one of `names` such as "Qwen2VL".

        Raises UserError if there is no file, or if it is of another family.
        """
        import transformers

        values = self.section("preprocessor_config.json", "image_processor")
        if not values:
            raise UserError(
                f"model.path = {self.source!r} has no preprocessor_config.json, which says how pictures are resized"
            )
        kind = values.get("image_processor_type") or f"{names[0]}ImageProcessor"
        name = kind.removesuffix("Fast").removesuffix("Pil").removesuffix("ImageProcessor")
        if name not in names:
            usual = " or ".join(f"{each}ImageProcessor" for each in names)
            raise UserError(
                f"model.path = {self.source!r}: preprocessor_config.json is of {kind}, and {self.kind} takes {usual}"
                "; copy the files of the processing from the checkpoint of the model"
            )
        known = {key: value for key, value in values.items() if not key.endswith(("_type", "_class"))}
        return getattr(transformers, f"{name}ImageProcessorPil")(**known)

    def agree(self, name: str, value: Any, own: Any) -> None:
        """Raise UserError unless a value of the processing is that of the model's configuration."""
        if value != own:
            raise UserError(
                f"model.path = {self.source!r}: pictures are processed with {name} = {value}, and the model has "
                f"{own}; copy the files of the processing from the checkpoint of the model"
            )

    def _parsed(self, name: str) -> Mapping[str, Any]:
        return json.loads(self.texts[name]) if name in self.texts else {}

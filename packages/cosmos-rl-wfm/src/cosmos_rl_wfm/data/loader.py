"""Loads the clips of a step's rows in threads, for supervised training and DDRL's data term.

    rows --threads--> caption, embedding, video or cached latents --in the order of the rows--> terms
             `--> a row without a usable clip: reported, counted, None

Random choices of a row (start of the clip, dropped caption, noise) depend only on the seed and the row's number in its
stream, so that they are the same in a resumed run, or with other threads.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from cosmos_rl_core.data.source import Faults
from cosmos_rl_core.errors import MediaError, SampleError
from cosmos_rl_core.types import Prompt
from cosmos_rl_wfm.data.cache import TensorCache, identity, key_of
from cosmos_rl_wfm.data.clips import ClipReader
from cosmos_rl_wfm.data.config import WFMDataConfig

if TYPE_CHECKING:
    from torch import Tensor

CUT = {"size", "buckets", "fps", "stride", "start"}
"""Keys of [data] that determine a clip's pixels."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedClip:
    """A row's clip and caption, for training."""

    caption: str
    """Empty where it was dropped."""
    text: np.ndarray | None
    """float32 [L, E]: the caption's embedding where the row has one and the caption was not dropped."""
    video: np.ndarray | None
    """uint8 [F, H, W, 3], RGB; None where its latents suffice."""
    latents: Tensor | None = None
    """float32 [C, f, h, w]; None where they are not cached."""
    key: str = ""
    """Key of the latents in the cache; "" without a cache."""
    rng: np.random.Generator
    """Generator of the row's further random choices."""
    is_real: bool = True
    """False for a blank clip in place of a missing one."""


class ClipLoader:
    """Loads the clips of rows, all of one [data] section.

    for clip in loader.load(prompts):
        ...
    """

    def __init__(
        self,
        config: WFMDataConfig,
        *,
        seed: int,
        text_width: int | None = None,
        cache: TensorCache | None = None,
        codec: str = "",
        needs_video: bool = True,
    ) -> None:
        """cache: of latents; `codec` identifies what encodes. needs_video: decode clips with cached latents too."""
        self._config = config
        self._seed = seed
        self._reader = ClipReader(config, text_width=text_width)
        self._cache = cache
        self._cut = [codec, config.model_dump(mode="json", include=CUT)]
        self._needs_video = needs_video
        self._faults = Faults("give no clip that can be trained on")
        self._pool = ThreadPoolExecutor(config.workers, thread_name_prefix="clips")

    def load(self, prompts: Sequence[Prompt]) -> Iterator[LoadedClip | None]:
        """Yield the clip of each row, in order; None for a row without a usable clip.

        Raises:
            UserError: a store refuses or does not answer, or most rows give no clip.
        """
        self._faults.want(len(prompts))
        for prompt, loaded in zip(prompts, self._pool.map(self._try, prompts), strict=True):
            if isinstance(loaded, SampleError):
                self._faults.add(_name(prompt.row), loaded.reason)
                yield None
            else:
                yield loaded

    def take_dropped(self) -> tuple[str, ...]:
        """Return the reasons of rows without a clip that were not returned before."""
        return self._faults.take_new()

    def keep(self, clip: LoadedClip, latents: Tensor) -> None:
        """Put the latents [C, f, h, w] of a clip into the cache, if there is one."""
        if self._cache is not None and clip.key:
            self._cache.put(clip.key, {"latents": latents})

    def _try(self, prompt: Prompt) -> LoadedClip | SampleError:
        """Load one row; runs in a thread."""
        reason = self._faults.reason(_name(prompt.row))
        if reason is not None:
            return MediaError(reason)
        try:
            return self._load(prompt.row, np.random.default_rng([self._seed, prompt.sample_id]))
        except SampleError as error:
            return error

    def _load(self, row: Mapping[str, Any], rng: np.random.Generator) -> LoadedClip:
        dropped = rng.random() < self._config.caption_dropout
        key, latents = self._cached(row)
        decoded = latents is None or self._needs_video
        return LoadedClip(
            caption="" if dropped else row["caption"],
            text=None if dropped else self._reader.text(row),
            video=self._reader.clip(row, rng).video if decoded else None,
            latents=latents,
            key=key,
            rng=rng,
        )

    def _cached(self, row: Mapping[str, Any]) -> tuple[str, Tensor | None]:
        if self._cache is None:
            return "", None
        try:
            file = identity(row, timeout_s=self._config.timeout_s)
        except OSError as error:
            raise MediaError(f"{row['key']}: cannot be read: {error}") from error
        key = key_of(file, self._cut)
        entry = self._cache.get(key)
        return key, None if entry is None else entry["latents"]


def _name(row: Mapping[str, Any]) -> Hashable:
    return row["key"], row["video"], tuple(row.get("video_at") or ())

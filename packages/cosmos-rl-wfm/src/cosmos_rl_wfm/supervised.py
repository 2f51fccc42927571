"""Real clips to microbatches of flow matching: each is noised at one time, and the network says which noise it was.

    row -- decode --> video -- encode --> clean latents --\
        -- embed --> condition                             > terms
        sample_id --> time, noise, place of the clip -----/
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from cosmos_rl_core.errors import SampleError, UserError
from cosmos_rl_core.types import Prompt, Share, TrainBatch
from cosmos_rl_wfm.collate import Term, stack
from cosmos_rl_wfm.conditions import Conditions, arrays_of
from cosmos_rl_wfm.data.cache import TensorCache, identity, key_of
from cosmos_rl_wfm.data.clips import ClipReader, TrainingClip
from cosmos_rl_wfm.data.config import WFMDataConfig
from cosmos_rl_wfm.samplers.times import draw_times

if TYPE_CHECKING:
    from torch import Tensor

    from cosmos_rl_wfm.models.model import DiffusersModel
    from cosmos_rl_wfm.policy import FlowPolicy

log = logging.getLogger(__name__)


def collate_sft(prompts: Sequence[Prompt], *, policy: FlowPolicy, microbatch_terms: int, share: Share) -> TrainBatch:
    """Turn rows with clips into microbatches; a row whose clip cannot be read is named, left out and counted."""
    assert policy.clips is not None, "a policy of real data has clips"
    terms = policy.clips.terms(prompts)
    if not terms:
        raise UserError(f"none of the {len(prompts)} rows of a step has a clip that can be trained on; see the log")
    batch = stack(terms, num_rollouts=len(terms), microbatch_terms=microbatch_terms, share=share)
    return replace(batch, metrics={"rows_dropped": float(len(prompts) - len(terms))})


class Clips:
    """Makes terms of rows with clips. Clips are decoded by threads."""

    def __init__(
        self,
        model: Callable[[], DiffusersModel],
        data: WFMDataConfig,
        *,
        conditions: Conditions,
        reader: ClipReader,
        cache: TensorCache | None,
        fingerprint: str,
        seed: int,
    ) -> None:
        """model: with codec and text encoder, asked for with the first row. cache: for latents, with what tells models
        apart as `fingerprint`."""
        self._load, self._conditions = model, conditions
        self._data, self._reader = data, reader
        self._cache, self._fingerprint = cache, fingerprint
        self._seed = seed
        self._model: DiffusersModel | None = None
        self._pool = ThreadPoolExecutor(data.workers, thread_name_prefix="clips")

    def terms(self, prompts: Sequence[Prompt]) -> list[Term]:
        """Return the terms of rows; one whose clip cannot be read is named in the log and left out.

        What is drawn for a row follows from the seed and its place in the stream.
        """
        terms: list[Term] = []
        for prompt, read in zip(prompts, self._pool.map(self._read, prompts), strict=True):
            if isinstance(read, SampleError):
                log.warning("left out: %s", read.reason)
            else:
                terms.append(self._term(prompt, *read, number=len(terms)))
        return terms

    def _read(self, prompt: Prompt) -> tuple[TrainingClip, np.random.Generator] | SampleError:
        """In a thread."""
        rng = np.random.default_rng([self._seed, prompt.sample_id])
        try:
            return self._reader(prompt.row, rng), rng
        except SampleError as error:
            return error

    def _term(self, prompt: Prompt, clip: TrainingClip, rng: np.random.Generator, *, number: int) -> Term:
        if self._model is None:
            self._model = self._load()
        model, conditions = self._model, self._conditions
        video = torch.from_numpy(clip.video)[None]
        clean = self._latents(model, prompt, video)
        condition = conditions.with_given(conditions.of_caption(clip.caption, prompt.row), video, rng)
        generator = torch.Generator().manual_seed(int(rng.integers(2**63)))
        noise_of = self._data.noise
        time = draw_times(
            1,
            generator=generator,
            density=noise_of.density,
            shift=model.traits.shift,
            mean=noise_of.mean,
            std=noise_of.std,
        )
        weight = 1.0 if noise_of.weighting == "uniform" else float(time.square() + (1 - time).square())
        inputs = {
            "clean": clean.numpy(),
            "noise": torch.randn(clean.shape, generator=generator).numpy(),
            "times": time[0].numpy(),
            "weights": np.float32(weight),
            **arrays_of(condition),
        }
        return Term(inputs=inputs, rollout=number)

    def _latents(self, model: DiffusersModel, prompt: Prompt, video: Tensor) -> Tensor:
        """[C, f, h, w]."""
        if self._cache is None:
            return model.encode(video)[0].cpu()
        key = key_of(identity(prompt.row), list(video.shape), self._data.start, self._fingerprint)
        return self._cache.get_or_make(key, lambda: {"latents": model.encode(video)[0].cpu()})["latents"]

"""Converts real clips to microbatches of flow matching: each is noised at one time, and the network predicts the noise.

    row -- read, decode --> video -- encode --> clean latents --\
                            caption -- embed --> condition       > terms
    sample_id --> time, noise, place of the clip ---------------/

Every row makes a term; the term of a row without a clip trains nothing. So all ranks run the same number of forward
passes in a step, whatever is wrong with the data.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import version
from typing import TYPE_CHECKING

import numpy as np
import torch

from cosmos_rl_core.data import video as decoding
from cosmos_rl_core.data.video import ByteCache
from cosmos_rl_core.types import Prompt, Share, TrainBatch
from cosmos_rl_wfm.collate import Term, deal_alike, stack
from cosmos_rl_wfm.conditions import Conditions, arrays_of
from cosmos_rl_wfm.data import mock, video
from cosmos_rl_wfm.data.cache import TensorCache, code_of, key_of
from cosmos_rl_wfm.data.clips import ClipReader
from cosmos_rl_wfm.data.config import WFMDataConfig
from cosmos_rl_wfm.data.loader import ClipLoader, LoadedClip
from cosmos_rl_wfm.data.storage import cache_folder
from cosmos_rl_wfm.models import codec
from cosmos_rl_wfm.models.base import ClipSize, Condition
from cosmos_rl_wfm.models.build import load_parts
from cosmos_rl_wfm.models.config import WFMModelConfig
from cosmos_rl_wfm.objectives.formulas import flow_weight
from cosmos_rl_wfm.samplers.times import sample_times

if TYPE_CHECKING:
    from torch import Tensor

    from cosmos_rl_wfm.models.model import DiffusersModel


def collate_sft(prompts: Sequence[Prompt], *, clips: Clips, microbatch_terms: int, share: Share) -> TrainBatch:
    """Turn rows of the section of `clips` into microbatches; a row without a clip is reported and counted.

    Raises:
        UserError: a store refuses or does not answer, most rows give no clip, or the model cannot take their size.
    """
    loaded = clips.load(prompts)
    dealt = deal_alike([clips.shape(clip) for clip in loaded], microbatch_terms=microbatch_terms, share=share)
    own = {place for places in dealt for place in places.needed}
    terms = {place: clips.term(prompts[place], loaded[place], number=place) for place in sorted(own)}
    trained = sum(clip.is_real for clip in loaded)
    return TrainBatch(
        microbatches=stack(terms, dealt),
        num_terms=trained,
        num_rollouts=trained,
        metrics={"rows_dropped": float(len(prompts) - trained)},
        rows_dropped=clips.take_dropped(),
    )


class Clips:
    """Makes terms from the rows of one [data] section.

    loaded = clips.load(prompts)                            on all ranks alike, which must agree on the rows with clips
    term = clips.term(prompts[i], loaded[i], number=i)      for this rank's terms
    """

    def __init__(
        self, model: DiffusersModel, data: WFMDataConfig, *, loader: ClipLoader, conditions: Conditions
    ) -> None:
        """model: with codec and text encoder."""
        self._model = model
        self._data, self._loader, self._conditions = data, loader, conditions

    def load(self, prompts: Sequence[Prompt]) -> list[LoadedClip]:
        """Read the clips of rows; a blank clip replaces a missing one."""
        return [self._blank() if clip is None else clip for clip in self._loader.load(prompts)]

    def take_dropped(self) -> tuple[str, ...]:
        """Return the reasons of rows without a clip that were not returned before."""
        return self._loader.take_dropped()

    def shape(self, clip: LoadedClip) -> tuple[int, ...]:
        """Return (C, f, h, w) of a clip's latents."""
        if clip.latents is not None:
            return tuple(clip.latents.shape)
        assert clip.video is not None, "a clip without latents is decoded"
        frames, height, width, _ = clip.video.shape
        return self._model.latent_shape(ClipSize(frames=frames, height=height, width=width))

    def term(self, prompt: Prompt, clip: LoadedClip, *, number: int) -> Term:
        """Encode and noise a clip; `number` is its row's index in the step."""
        video = None if clip.video is None else torch.from_numpy(clip.video)[None]
        condition = self._conditions.of_caption(clip.caption, prompt.row, text=clip.text)
        if video is not None:
            condition = self._conditions.with_given(condition, video, clip.rng)
        clean = self._latents(clip, video)
        inputs = {**self._noised(clean, clip.rng, shift=self._model.traits.shift), **arrays_of(condition)}
        return Term(inputs=inputs, rollout=number, trained=clip.is_real)

    def _latents(self, clip: LoadedClip, video: Tensor | None) -> Tensor:
        """[C, f, h, w]."""
        if clip.latents is not None:
            return clip.latents
        assert video is not None, "a clip without latents is decoded"
        latents = self._model.encode(video)[0].cpu()
        self._loader.keep(clip, latents)
        return latents

    def _noised(self, clean: Tensor, rng: np.random.Generator, *, shift: float) -> dict[str, np.ndarray]:
        """Sample time and noise of latents [C, f, h, w]."""
        generator = torch.Generator().manual_seed(int(rng.integers(2**63)))
        section = self._data.noise
        time = sample_times(
            1, generator=generator, density=section.density, shift=shift, mean=section.mean, std=section.std
        )
        return {
            "clean": clean.numpy(),
            "noise": torch.randn(clean.shape, generator=generator).numpy(),
            "times": time[0].numpy(),
            "weights": flow_weight(time, section.weighting)[0].numpy(),
        }

    def _blank(self) -> LoadedClip:
        height, width = self._data.sizes[0]
        video = np.zeros((self._data.size.frames, height, width, 3), np.uint8)
        return LoadedClip(caption="", text=None, video=video, rng=np.random.default_rng(0), is_real=False)


_ENCODING = (decoding, video, mock, codec)
"""Modules that compute the pixels of clips and their latents."""


class ClipSources:
    """The real clips of [data] sections. Codec and text encoder are loaded with the first section."""

    def __init__(self, model: DiffusersModel, config: WFMModelConfig, *, seed: int, device: torch.device) -> None:
        self._model, self._config = model, config
        self._seed, self._device = seed, device
        self._captions = ByteCache[Condition](config.text.cache_bytes)
        self._sections: dict[WFMDataConfig, Clips] = {}

    def of(self, section: WFMDataConfig) -> Clips:
        """Return the clips of a section, made at its first use. Raises UserError for sizes that do not fit."""
        if section not in self._sections:
            model, config = self._model, self._config
            check_sizes(model, section)
            load_parts(model, config, {"codec", "text"}, seed=config.seed, device=self._device)
            loader = _clip_loader(model, config, section, seed=self._seed)
            conditions = conditions_of(model, config, section, self._captions)
            self._sections[section] = Clips(model, section, loader=loader, conditions=conditions)
        return self._sections[section]


def conditions_of(
    model: DiffusersModel, config: WFMModelConfig, data: WFMDataConfig, captions: ByteCache[Condition]
) -> Conditions:
    reader = ClipReader(data, text_width=model.family.text_width)
    return Conditions(model, reader, config.given, captions=captions)


def check_sizes(model: DiffusersModel, data: WFMDataConfig) -> None:
    """Raise UserError for a clip size that the model does not accept."""
    for height, width in sorted({(data.size.height, data.size.width), *data.sizes}):
        model.check(ClipSize(frames=data.size.frames, height=height, width=width))


def _clip_loader(model: DiffusersModel, config: WFMModelConfig, data: WFMDataConfig, *, seed: int) -> ClipLoader:
    cache = _latents_cache(config, data)
    return ClipLoader(
        data,
        seed=seed,
        text_width=model.family.text_width,
        cache=cache,
        codec="" if cache is None else key_of(model.codec_fingerprint(), version("av"), code_of(*_ENCODING)),
        needs_video=config.given.max_frames > 0,
    )


def _latents_cache(config: WFMModelConfig, data: WFMDataConfig) -> TensorCache | None:
    """The cache of latents; None if encoding is as fast, or no clip repeats."""
    if config.codec == "pixels" or data.start == "random":
        return None
    return TensorCache(cache_folder(data.cache_path) / "latents", max_bytes=data.cache_bytes)

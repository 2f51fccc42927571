"""Estimates the memory of a world model's run beside the trained network, for `cosmos-rl plan`.

    policy rank       averages and old weights; for real clips the autoencoder, the encoders and their activations
    rollout replica   the autoencoder, the encoders, and the activations of denoising and decoding

Weights are counted from the headers of their files, or from config.json where there are none; activations of networks
and autoencoders by a run on fake tensors.
Loads torch and diffusers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from cosmos_rl_core.parallel.dims import ParallelDims
from cosmos_rl_core.plan.estimate import MemoryEstimate
from cosmos_rl_core.plan.layer_bytes import BYTES
from cosmos_rl_core.plan.needs import PREPARE, START, STEP, MemoryPart
from cosmos_rl_core.recipe.run import RunConfig
from cosmos_rl_core.storage.safetensors_header import read_header
from cosmos_rl_wfm.data.config import WFMDataConfig
from cosmos_rl_wfm.engines.torch import WFMTorchOptions
from cosmos_rl_wfm.models.base import ClipSize
from cosmos_rl_wfm.models.build import WORDS, quiet
from cosmos_rl_wfm.models.classes import compression
from cosmos_rl_wfm.models.config import WFMModelConfig
from cosmos_rl_wfm.models.dry_run import CodecBytes, codec_bytes, encoder_numbers, network_bytes
from cosmos_rl_wfm.models.folder import ModelFolder, network_of, open_source, vae_of
from cosmos_rl_wfm.models.networks.families import make_family
from cosmos_rl_wfm.models.networks.family import Family
from cosmos_rl_wfm.models.weights import with_defaults
from cosmos_rl_wfm.parallel.shape import network_files, parameter_shapes

CAPTIONS = "captions are embedded"
CLIPS = "real clips are encoded"
OTHERS = "another set of weights computes"
DENOISING = "samples are denoised"
DECODING = "samples are decoded"

_ENCODERS = ("text_encoder", "text_encoder_2", "text_encoder_3")
_STATES = 6
"""Tensors of the latents' size that a denoising step needs beside the path: state, noise, velocities, means."""
_INPUTS = 10
"""The same for a trained term: its two states, noise, velocities, means, and the tensors that their loss saves."""


def held_by_policy(config: RunConfig, rank: MemoryEstimate) -> list[MemoryPart]:
    """Return the memory of a policy rank that `rank` does not count."""
    parts = _Parts(config)
    model, sampling, memory = config.model, config.policy_sampling, config.policy.memory
    ranks = ParallelDims.of(config.policy.parallel, world_size=config.policy.world_size).world_size
    offloaded = memory.parameter_offload and ranks > 1
    size = BYTES[config.policy.precision.parameters]
    copy = BYTES["float32"] * rank.gradients // size
    old = None if sampling is None else sampling.old_decay
    entries: list[MemoryPart] = []
    if size != BYTES["float32"]:  # parameters and, where they are trained, gradients and moments
        kept = (size if model.lora else 4 * size) * parts.kept_in_float32
        entries.append(MemoryPart(name="parameters kept in float32", bytes=kept, host=offloaded, away=True))
    if model.ema is not None:
        entries.append(MemoryPart(name="average of the weights", bytes=copy, host=offloaded, away=True))
    if old is not None or model.pulls_to_average:
        entries.append(MemoryPart(name="weights that sample the rollouts", bytes=copy, host=offloaded, away=True))
        entries.append(
            MemoryPart(name="trained weights, set aside", bytes=rank.gradients, at=(OTHERS,), host=offloaded)
        )
        entries.append(MemoryPart(name="a forward pass", bytes=rank.gathered + rank.backward, at=(OTHERS,)))
    entries += parts.velocities(separate=bool(config.algorithm.kl_coef))
    entries.append(
        MemoryPart(name="captions and latents", bytes=parts.inputs(config.policy.microbatch_terms), at=(STEP,))
    )
    if _reads_clips(config):
        entries += [*parts.encoders(at=(CAPTIONS,)), *parts.codec(), *parts.encoding()]
    elif sampling is not None and sampling.guidance is not None:
        entries += parts.encoders(at=(PREPARE,), only=PREPARE)
        if ranks == 1:  # of several, the network is on meta then
            built = rank.reference or rank.parameters
            entries.append(MemoryPart(name="network, loaded before", bytes=built, at=(PREPARE,)))
        if rank.reference:
            entries.append(
                MemoryPart(name="policy, while its reference is built", bytes=rank.parameters, at=(PREPARE,))
            )
    if not model.path and (ranks > 1 or size < BYTES["float32"]):
        entries += parts.building()
    elif ranks > 1:
        entries += rank.while_filled(host=offloaded)
    return entries


def held_by_rollout(config: RunConfig) -> list[MemoryPart]:
    """Return the memory of a rollout replica beside the network's weights."""
    parts = _Parts(config)
    entries = [*parts.encoders(at=(CAPTIONS,)), *parts.codec()]
    if (size := BYTES[config.model.dtype]) != BYTES["float32"]:
        entries.append(MemoryPart(name="parameters kept in float32", bytes=size * parts.kept_in_float32, away=True))
        if not config.model.path:
            entries += parts.building()
    if config.model.given.max_frames:
        entries += parts.encoding()
    return [*entries, *parts.generating()]


def _reads_clips(config: RunConfig) -> bool:
    return config.is_sft or config.data_regularization.coef > 0 or config.eval.loss_data is not None


@dataclass(frozen=True)
class _Parts:
    """The parts of one recipe's model, each computed once."""

    config: RunConfig

    @property
    def model(self) -> WFMModelConfig:
        return self.config.model

    @property
    def data(self) -> WFMDataConfig:
        return self.config.data

    @cached_property
    def folder(self) -> ModelFolder | None:
        quiet()
        return open_source(self.model)

    @cached_property
    def network(self) -> tuple[str, Mapping[str, Any]]:
        return network_of(self.model, self.folder)

    @cached_property
    def family(self) -> Family:
        name, values = self.network
        return make_family(name, with_defaults(name, values))

    @cached_property
    def numbers(self) -> Mapping[str, int]:
        """Parameters of the network, by name."""
        shapes = parameter_shapes(*self.network, network_files(self.folder))
        return {name: math.prod(shape) for name, shape in shapes.items()}

    @property
    def kept_in_float32(self) -> int:
        """Parameters that stay in float32 whatever the dtype of the others."""
        import diffusers

        kept = getattr(diffusers, self.network[0])._keep_in_fp32_modules or ()
        return sum(number for name, number in self.numbers.items() if set(kept) & set(name.split(".")))

    @property
    def text_length(self) -> int:
        return self.model.text.length or (WORDS if self.model.text.encoder == "words" else self.family.text_length)

    @property
    def size(self) -> ClipSize:
        """The largest clip."""
        height, width = max([(self.data.size.height, self.data.size.width), *self.data.sizes], key=math.prod)
        return ClipSize(frames=self.data.size.frames, height=height, width=width)

    @cached_property
    def latents(self) -> tuple[int, int, int, int]:
        size = self.size
        channels, frames, pixels = self.family.channels, 1, 1
        if self.model.codec == "vae":
            channels, frames, pixels = compression(*vae_of(self.model, self.folder))
        return channels, (size.frames - 1) // frames + 1, size.height // pixels, size.width // pixels

    @property
    def pixels(self) -> int:
        """Bytes of a clip in uint8."""
        return 3 * self.size.frames * self.size.height * self.size.width

    @cached_property
    def codec_bytes(self) -> CodecBytes:
        if self.model.codec == "pixels":  # only conversions between uint8 and float32
            converted = 4 * BYTES["float32"] * self.pixels
            return CodecBytes(weights=0, encode=converted, decode=converted)
        name, values = vae_of(self.model, self.folder)
        dtype, tiling = self.model.codec_dtype, self.model.codec_tiling
        return codec_bytes(name, values, dtype=dtype, tiling=tiling, size=self.size, latents=self.latents)

    def inputs(self, terms: int) -> int:
        """Bytes of the inputs of a pass over terms of different captions."""
        captions = terms * self.text_length * self.family.text_width * (BYTES["float32"] + BYTES[self.model.dtype])
        return captions + _INPUTS * BYTES["float32"] * terms * math.prod(self.latents)

    def velocities(self, *, separate: bool) -> Iterator[MemoryPart]:
        """Outputs of the old weights and, with `separate`, of the reference for all terms of a step."""
        config, sampling = self.config, self.config.policy_sampling
        if sampling is None:
            return
        share = ParallelDims.of(config.policy.parallel, world_size=config.policy.world_size)
        share = share.num_shares * config.policy.replicas
        terms = -(-config.policy.prompts_per_step * config.rollout.group_size * sampling.max_terms // share)
        size = BYTES["float32"] * terms * math.prod(self.latents)
        if separate:
            yield MemoryPart(name="outputs of the reference", bytes=size, host=True)
        if not sampling.trains_steps:
            yield MemoryPart(name="velocities of the old weights", bytes=size, host=True)

    def building(self) -> Iterator[MemoryPart]:
        """A network with random weights, made whole in float32 before it is cast and sharded."""
        num_bytes = BYTES["float32"] * sum(self.numbers.values())
        yield MemoryPart(name="the whole network in float32", bytes=num_bytes, at=(START,))

    def encoders(self, *, at: tuple[str, ...], only: str = "") -> Iterator[MemoryPart]:
        """The text encoder, its activations, and the captions in host memory; `only`: the one phase that keeps it."""
        if self.model.text.encoder == "model" and self.folder is not None:
            offload = self.model.text.offload
            phases = at if offload or only else ()
            for name in _ENCODERS:
                if name in self.folder.classes:
                    size = _weight_bytes(self.folder, name, dtype=self.model.dtype)
                    yield MemoryPart(name=name.replace("_", " "), bytes=size, at=phases, away=not phases)
                    if offload and not only:
                        yield MemoryPart(name=f"{name.replace('_', ' ')}, offloaded", bytes=size, host=True)
            yield MemoryPart(name="a caption's embedding", bytes=self._embedding_bytes(), at=at)
        if not only:
            yield MemoryPart(name="cached captions", bytes=self.model.text.cache_bytes, host=True)

    def codec(self) -> Iterator[MemoryPart]:
        """The autoencoder, and the image encoder where there is one."""
        yield MemoryPart(name="autoencoder", bytes=self.codec_bytes.weights, away=True)
        if self.folder is not None and self.folder.has("image_encoder"):
            size = _weight_bytes(self.folder, "image_encoder", dtype=self.model.dtype)
            yield MemoryPart(name="image encoder", bytes=size, away=True)

    def encoding(self) -> Iterator[MemoryPart]:
        yield MemoryPart(name="encoding of clips", bytes=self.codec_bytes.encode, at=(CLIPS,))

    def generating(self) -> Iterator[MemoryPart]:
        """Memory to denoise and decode a batch of samples."""
        options = WFMTorchOptions.model_validate(dict(self.config.rollout.options))
        samples, sampling = options.samples_at_once, self.config.rollout.sampling
        steps = max(sampling.num_steps, sampling.eval_num_steps)
        states = BYTES["float32"] * samples * math.prod(self.latents)
        yield MemoryPart(name="states of the samples", bytes=(steps + 1 + _STATES) * states, at=(DENOISING, DECODING))
        yield MemoryPart(name="a forward pass", bytes=self._forward_bytes(samples), at=(DENOISING,))
        yield MemoryPart(name="decoding of clips", bytes=self.codec_bytes.decode, at=(DECODING,))
        yield MemoryPart(name="decoded clips", bytes=2 * samples * self.pixels, at=(DECODING,))

    def _forward_bytes(self, samples: int) -> int:
        name, values = self.network
        forward = network_bytes(
            name,
            values,
            dtype=self.model.dtype,
            latents=self.latents,
            samples=samples,
            captions=samples,
            text_length=self.text_length,
        )
        guided = self.config.rollout.sampling.guidance is not None
        text = BYTES["float32"] * self.text_length * self.family.text_width  # of the unconditional pass
        return forward + guided * text

    def _embedding_bytes(self) -> int:
        """For one caption at most: all layers' states, normalised and concatenated, a layer's activations, logits."""
        assert self.folder is not None, "encoders are of a folder"
        length, size = self.text_length, BYTES["float32"]
        num_bytes = 3 * size * length * self.family.text_width
        for name in _ENCODERS:
            if self.folder.has(name):
                config = self.folder.config(name)
                config = {**config, **config.get("text_config", {})}
                width = _first(config, "hidden_size", "d_model")
                inner = _first(config, "intermediate_size", "d_ff")
                heads = _first(config, "num_attention_heads", "num_heads")
                layers = _first(config, "num_hidden_layers", "num_layers")
                row = (layers + 8) * width + 4 * inner + 2 * heads * length + config.get("vocab_size", 0)
                num_bytes += size * length * row
        return num_bytes


def _first(config: Mapping[str, Any], *keys: str) -> int:
    return next((config[key] for key in keys if isinstance(config.get(key), int)), 0)


def _weight_bytes(folder: ModelFolder, name: str, *, dtype: str) -> int | None:
    """Bytes of an encoder's weights in `dtype`, by their headers or config.json; None where both are missing."""
    files = folder.weights(name, missing_ok=True) if folder.has(name) else []
    numbers = 0
    for path in files:
        with path.open("rb") as file:
            numbers += sum(math.prod(place.shape) for place in read_header(file, name=str(path)).values())
    if not files:
        config = folder.config(name) if folder.has(name) else {}
        computed = encoder_numbers(folder.classes[name][1], config) if config else None
        if computed is None:
            return None
        numbers = computed
    return BYTES[dtype] * numbers

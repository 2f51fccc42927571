"""The [model] section of a recipe for world foundation models. Imports neither torch nor diffusers."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import Field, model_validator

from cosmos_rl_core.parallel.config import LoraSection
from cosmos_rl_core.settings.base import Strict

FamilyName = Literal["wan", "cosmos", "sd3", "sana", "sana_video", "flow"]
Guidance = Literal["from_unconditional", "beyond_conditional"]


class WFMLoraSection(LoraSection):
    """[model.lora]: train low-rank adapters on linear layers and freeze the network itself."""

    alpha: float = Field(default=64.0, gt=0)
    """The update is scaled by alpha / rank."""
    target_modules: Literal["family", "all-linear"] | tuple[str, ...] = "family"  # pyright: ignore[reportIncompatibleVariableOverride] one more
    """Adapted layers by name suffix, such as ["to_q", "to_out.0"]; "family": the attention layers of the family."""

    def targets(self, family: tuple[str, ...]) -> Literal["all-linear"] | tuple[str, ...]:
        """`target_modules`, with "family" replaced by the name suffixes `family`."""
        return family if self.target_modules == "family" else self.target_modules


class EmaSection(Strict):
    """[model.ema]: an average of the trained weights over the steps, for `cosmos-rl export`, `generate` and `eval`."""

    decay: float | None = Field(default=None, gt=0, lt=1)
    """Decay per step, such as 0.999: average = decay * average + (1 - decay) * weights."""
    warmup_power: float | None = Field(default=None, gt=0, le=1)
    """With decay: limits it to 1 - t ^ -power after step t; 2/3 for a million steps and more, 3/4 for fewer."""
    width: float | None = Field(default=None, gt=0, le=0.288)
    """Instead of decay: average over this fraction of the run so far; 0.1 in the training of Cosmos-Predict2.5."""
    reference: bool = False
    """Use the average as the reference of the KL term, instead of the initial model."""

    @model_validator(mode="after")
    def _one_kind(self) -> Self:
        if (self.decay is None) == (self.width is None):
            raise ValueError("takes either decay, such as 0.999, or width, such as 0.1")
        if self.width is not None and self.warmup_power is not None:
            raise ValueError("warmup_power needs decay; an average with width already starts from the weights")
        return self


class TextSection(Strict):
    """[model.text]: the embedding of captions."""

    encoder: Literal["model", "words", "cached"] = "model"
    """The model's own encoder; a fixed random vector for each word, for demos; or embeddings beside the data."""
    length: int | None = Field(default=None, ge=1)
    """Tokens to which a caption is cut or padded; without it the length of the family's training (16 with "words")."""
    seed: int = 0
    """Width of the vectors of "words"."""
    instruction: str = ""
    """Prefix of every non-empty caption, as in Sana's prompts; only for encoders of the Gemma family."""
    negative_prompt: str | None = None
    """Negative prompt of guidance; without it that of the model's pipeline in diffusers, which is empty except for
    Cosmos; empty if the model's own encoder is not used."""
    cache_bytes: int = Field(default=2 * 2**30, ge=0)
    """Size of a process's cache of embedded captions in host memory: Predict2.5's take 98 MiB each, Wan's 4."""

    offload: bool = False
    """Keep the model's own encoder in host memory, and on the GPU only while captions are embedded that are not in the
    cache. In bfloat16 Wan's has 10.6 GiB, which are copied each time. No effect on a CPU."""

    @model_validator(mode="after")
    def _can_embed(self) -> Self:
        if self.encoder == "cached" and self.negative_prompt:
            raise ValueError(
                'encoder = "cached" embeds no negative_prompt: remove it, or set encoder = "model" or "words"'
            )
        if self.offload and self.encoder != "model":
            raise ValueError(f'encoder = "{self.encoder}" has no weights to offload: remove offload')
        return self


class GivenSection(Strict):
    """[model.given]: first frames given to the network, for image-to-video and video-to-video models."""

    min_frames: int = Field(default=0, ge=0)
    """Fewest given latent frames; the number is sampled for each clip."""
    max_frames: int = Field(default=0, ge=0)
    """Most given latent frames."""

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if self.min_frames > self.max_frames:
            raise ValueError(
                f"min_frames = {self.min_frames} is above max_frames = {self.max_frames}; raise max_frames"
            )
        return self


class WFMModelConfig(Strict):
    """[model]: the video or image model to train, with its codec and text encoder."""

    path: str = ""
    """A diffusers folder of a pipeline or of its network alone, or a hub id; "" builds a network from scratch."""
    revision: str | None = None
    """Branch, tag or commit on the hub; only for a model id."""
    family: Literal["auto"] | FamilyName = "auto"
    """Calling convention of the network; "auto": by the class in the folder. "flow" declares that an unlisted class
    takes latents, times of 0 .. 1000 and text, and predicts noise - data; `check` calls it once."""
    network: dict[str, Any] = Field(default_factory=dict)
    """With path = "": constructor arguments of the randomly initialised network; "_class_name" for family "flow"."""
    tiny: bool = False
    """With path = "": the family's classes at tiny sizes with random weights, to try out recipes on any machine."""
    seed: int = Field(default=0, ge=0)
    """Seed of initial weights: of a model from scratch, the same in policy and engines, and of adapters."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of forward passes and of the engine's weights; [policy.precision] sets that of trained weights."""
    codec: Literal["vae", "pixels"] = "vae"
    """Conversion of video to latents: the model's autoencoder, or none: pixels in [-1, 1], for tiny demos."""
    codec_dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of the autoencoder."""
    codec_tiling: bool = False
    """Encode and decode frames in overlapping tiles, as `enable_tiling` of diffusers: the memory of a tile instead of a
    frame, for 720p; tiles are blended where they overlap. Frames that are not larger than a tile stay whole."""
    shift: float | None = Field(default=None, gt=0)
    """Timestep shift s in t -> s t / (1 + (s - 1) t); without it that of the model's scheduler, else 1."""
    guidance: Literal["auto"] | Guidance = "auto"
    """v_u + g (v_c - v_u), off at g = 1, or v_c + g (v_c - v_u), off at g = 0; "auto": the family's own."""
    text: TextSection = TextSection()
    given: GivenSection = GivenSection()
    lora: WFMLoraSection | None = None
    """Train adapters of the network, and send only them to the engines."""
    ema: EmaSection | None = None
    """Keep an average of the trained weights."""

    @property
    def pulls_to_average(self) -> bool:
        """Whether the average of the weights is the reference of the KL term."""
        return self.ema is not None and self.ema.reference

    @model_validator(mode="after")
    def _path_or_scratch(self) -> Self:
        if self.path:
            if self.network or self.tiny:
                key = "network" if self.network else "tiny"
                raise ValueError(f'{key} is for a model from scratch: remove it, or set path = ""')
            return self
        if self.revision is not None:
            raise ValueError("revision is for a model id on the hub: set path, or remove revision")
        if self.family == "auto" or not (self.network or self.tiny):
            raise ValueError(
                'path = "" builds a model from scratch, which needs family, and tiny = true or [model.network]; '
                "otherwise set path to a diffusers folder or a hub id"
            )
        if self.family == "flow" and "_class_name" not in self.network:
            raise ValueError('family = "flow" needs network._class_name, a class of diffusers')
        return self

    @model_validator(mode="after")
    def _parts_exist(self) -> Self:
        if not self.path and not self.tiny and self.codec == "vae":
            raise ValueError('a network from scratch has no autoencoder: set codec = "pixels", or tiny = true')
        if not self.path and self.text.encoder == "model":
            raise ValueError('a model from scratch has no text encoder: set text.encoder = "words" or "cached"')
        return self

"""The [model] section of a recipe for world foundation models. Neither torch nor diffusers."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import Field, model_validator

from cosmos_rl_core.parallel.config import LoraSection
from cosmos_rl_core.settings.base import Strict

FamilyName = Literal["wan", "cosmos", "sd3", "sana", "sana_video", "flow"]
Guidance = Literal["from_unconditional", "beyond_conditional"]


class WFMLoraSection(LoraSection):
    """[model.lora]: train low-rank adapters on linear layers and leave the network itself as it is."""

    alpha: float = Field(default=64.0, gt=0)
    """The update is scaled by alpha / rank."""
    target_modules: Literal["family", "all-linear"] | tuple[str, ...] = "family"  # pyright: ignore[reportIncompatibleVariableOverride] one more
    """Layers that get an adapter, by the end of their names, such as ["to_q", "to_out.0"]; "family": its attention."""

    def targets(self, family: tuple[str, ...]) -> Literal["all-linear"] | tuple[str, ...]:
        """`target_modules` with the ends of names that "family" means for this one."""
        return family if self.target_modules == "family" else self.target_modules


class EmaSection(Strict):
    """[model.ema]: an average of the trained weights over the steps; it is what is exported and generated with."""

    decay: float | None = Field(default=None, gt=0, lt=1)
    """Part of the average that each step leaves as it is, such as 0.999; the rest is taken from the weights."""
    warmup_power: float | None = Field(default=None, gt=0, le=1)
    """With decay: after step t it is 1 - t ^ -power at most; 2/3 for a million steps and more, 3/4 for fewer."""
    width: float | None = Field(default=None, gt=0, le=0.288)
    """Instead of decay: average over this fraction of the run so far; 0.1 in the training of Cosmos-Predict2.5."""
    reference: bool = False
    """Let a KL term pull towards the average, and not towards the model that the run starts from."""

    @model_validator(mode="after")
    def _one_kind(self) -> Self:
        if (self.decay is None) == (self.width is None):
            raise ValueError("takes either decay, such as 0.999, or width, such as 0.1")
        if self.width is not None and self.warmup_power is not None:
            raise ValueError("warmup_power goes with decay; an average of a width begins with the weights as it is")
        return self


class TextSection(Strict):
    """[model.text]: how captions are embedded."""

    encoder: Literal["model", "words", "cached"] = "model"
    """The model's own encoder; a fixed random vector for each word, for demos; or embeddings beside the data."""
    length: int | None = Field(default=None, ge=1)
    """Tokens a caption is cut or padded to; without it what the family was trained with (16 with "words")."""
    seed: int = 0
    """Of the vectors of "words"."""
    instruction: str = ""
    """Put before each caption but the empty one, as Sana's prompts are; only for encoders of the Gemma family."""
    negative_prompt: str | None = None
    """Caption that guidance leads away from; without it the one of the model's pipeline in diffusers, which is empty
    but for Cosmos, and empty where the model's own encoder is not used."""
    cache_bytes: int = Field(default=2 * 2**30, ge=0)
    """Most host memory that a process keeps embedded captions in: Predict2.5's take 98 MiB each, Wan's 4."""

    @model_validator(mode="after")
    def _can_embed(self) -> Self:
        if self.encoder == "cached" and self.negative_prompt:
            raise ValueError(
                'encoder = "cached" embeds no negative_prompt: remove it, or set encoder = "model" or "words"'
            )
        return self


class GivenSection(Strict):
    """[model.given]: first frames that are handed to the network, as image and video to video models want."""

    min_frames: int = Field(default=0, ge=0)
    """Fewest latent frames that are given; each clip draws a number of its own."""
    max_frames: int = Field(default=0, ge=0)
    """Most of them."""

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if self.min_frames > self.max_frames:
            raise ValueError(
                f"min_frames = {self.min_frames} is above max_frames = {self.max_frames}; raise max_frames"
            )
        return self


class WFMModelConfig(Strict):
    """[model]: which video or image model is trained, and what surrounds its network."""

    path: str = ""
    """A diffusers folder, of a pipeline or of its network alone, or a hub's id; "" makes a network from scratch."""
    revision: str | None = None
    """Branch, tag or commit on the hub; only for a model id."""
    family: Literal["auto"] | FamilyName = "auto"
    """How the network is called; "auto": by the class that the folder names. "flow" claims of a class that is not known
    that it takes latents, times of 0 .. 1000 and text, and predicts noise - data; `check` calls it once."""
    network: dict[str, Any] = Field(default_factory=dict)
    """With path = "": arguments of the network's class, which has random weights; "_class_name" for family "flow"."""
    tiny: bool = False
    """With path = "": the family's classes at sizes that run anywhere, with random weights: for trying out recipes."""
    seed: int = Field(default=0, ge=0)
    """Of random weights: of a model from scratch, the same in policy and engines, and of adapters' first values."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of forward passes and of the engine's weights; [policy.precision] has that of trained weights."""
    codec: Literal["vae", "pixels"] = "vae"
    """What turns video into latents: the model's autoencoder, or nothing: pixels in [-1, 1], for tiny demos."""
    codec_dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the autoencoder."""
    shift: float | None = Field(default=None, gt=0)
    """Timestep shift s, t -> s t / (1 + (s - 1) t); without it that of the model's scheduler, else 1."""
    guidance: Literal["auto"] | Guidance = "auto"
    """v_u + g (v_c - v_u), off at g = 1, or v_c + g (v_c - v_u), off at g = 0; "auto": the family's own."""
    text: TextSection = TextSection()
    given: GivenSection = GivenSection()
    lora: WFMLoraSection | None = None
    """Train adapters of the network, and send them alone to the engines."""
    ema: EmaSection | None = None
    """Keep an average of the trained weights."""

    @property
    def pulls_to_average(self) -> bool:
        """Whether a KL term pulls towards the average of the weights."""
        return self.ema is not None and self.ema.reference

    @model_validator(mode="after")
    def _path_or_scratch(self) -> Self:
        if self.path:
            if self.network or self.tiny:
                key = "network" if self.network else "tiny"
                raise ValueError(f'{key} is for a model from scratch: remove it, or set path = ""')
            return self
        if self.revision is not None:
            raise ValueError("revision is for a model id on the hub: give path, or remove revision")
        if self.family == "auto" or not (self.network or self.tiny):
            raise ValueError(
                'path = "" makes a model from scratch, which needs family, and tiny = true or [model.network]; '
                "otherwise give path, a diffusers folder or a hub's id"
            )
        if self.family == "flow" and "_class_name" not in self.network:
            raise ValueError('family = "flow" needs network._class_name, a class of diffusers')
        return self

    @model_validator(mode="after")
    def _parts_there(self) -> Self:
        if not self.path and not self.tiny and self.codec == "vae":
            raise ValueError('a network from scratch has no autoencoder: set codec = "pixels", or tiny = true')
        if not self.path and self.text.encoder == "model":
            raise ValueError('a model from scratch has no text encoder: set text.encoder = "words" or "cached"')
        return self

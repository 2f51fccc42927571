"""The [model] section of a robot recipe. Free of torch."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from cosmos_rl_core.parallel.config import LoraSection
from cosmos_rl_core.settings.base import Strict

FamilyName = Literal["pi0", "pi05", "openvla", "openvla_oft", "mlp"]


class NoiseSection(Strict):
    """[model.noise]: where denoising draws, so that it has a likelihood; the other steps follow the ODE."""

    kind: Literal["sde", "cps", "learned", "fixed"] = "fixed"
    """"sde" (flow-SDE), "cps", "learned" (flow-noise: a head gives the deviation), "fixed": around the ODE's mean."""
    level: float = Field(default=0.3, gt=0)
    """sde: a of sigma. cps: 0 .. 1. fixed: the standard deviation."""
    level_end: float | None = Field(default=None, gt=0)
    """What the level comes to in equal parts over `level_steps` optimizer steps; without it it stays."""
    level_steps: int = Field(default=0, ge=0)
    """Those steps."""
    steps: Literal["random", "last", "all"] = "last"
    """Which step draws: one at random in each decision, the last, or all of them."""
    ignore_last: bool = False
    """Leave the last step to the ODE."""
    std_low: float = Field(default=0.08, gt=0)
    """learned: least deviation."""
    std_high: float = Field(default=0.16, gt=0)
    """learned: greatest."""


class CriticSection(Strict):
    """[model.critic]: the head that estimates values."""

    place: Literal["prefix", "expert", "none"] = "prefix"
    """What it reads: what the language model made of the observation, or the expert's outputs at the actions."""
    per: Literal["chunk", "action"] = "chunk"
    """One value a decision, or one for each action."""
    pool: Literal["mean", "attention"] = "attention"
    """How tokens become one vector."""
    hidden: tuple[int, ...] = (128,)
    """Widths of its layers."""
    detach: bool = True
    """Keep its gradient from what it reads: a trunk that it moves moves the policy too."""


class VLAModelConfig(Strict):
    """[model]: a directory of a model, or the sizes of one from scratch."""

    path: str = ""
    """Directory with config.json, weights, tokenizer and action statistics, as supervised training exports it; or a
    public checkpoint. Without it the model is drawn at random."""
    family: FamilyName = "pi05"
    """From scratch: which. A directory says what it holds, but for a public one of OpenVLA: it may be either."""
    action_dim: int | None = Field(default=None, ge=1)
    """Dimensions of an action; needed from scratch, else those of the checkpoint."""
    state_dim: int | None = Field(default=None, ge=0)
    """Numbers of proprioception; needed from scratch."""
    horizon: int | None = Field(default=None, ge=1)
    """Actions executed a decision; without it 5 from scratch, else as the checkpoint has it."""
    num_steps: int | None = Field(default=None, ge=1)
    """Denoising steps of a decision."""
    aux_dim: int = Field(default=0, ge=0)
    """Numbers that supervised training teaches it to read off the pictures beside acting; 0: none."""
    aux_coef: float = Field(default=1.0, ge=0)
    """Coefficient of that loss."""
    noise: NoiseSection | None = None
    """Without it that of the checkpoint, or the default."""
    critic: CriticSection | None = None
    """The same; one that a checkpoint lacks, or has of other sizes, begins as it is drawn."""
    temperature: float | None = Field(default=None, gt=0)
    """openvla: of the distribution over action tokens, in rollouts and in training; 1 without it."""
    image_crop: float | None = Field(default=None, gt=0, le=1)
    """openvla: area of a picture's middle that is looked at; 0.9 for models fine-tuned on random crops of that size."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of matrix products and of the engine's weights; what leads to log-probabilities and values stays in float32.
    [policy.precision] has that of trained weights."""
    train: Literal["all", "expert"] = "all"
    """What learns: everything, or what is not the language and vision model."""
    lora: LoraSection | None = None
    """Train adapters on the model of `path`."""
    words: tuple[str, ...] = ()
    """From scratch: instructions whose words the tokenizer knows; those of the demonstrations are added."""
    stats: str = ""
    """File with action statistics; by default the model's own, or those of the demonstrations. "unit" for actions that
    lie in [-1, 1] already, with `action_dim`."""
    unnorm_key: str = ""
    """openvla: the dataset whose statistics are taken, where a public directory has several."""
    seed: int = Field(default=0, ge=0)
    """Of what is drawn at random."""

    @model_validator(mode="after")
    def _sized(self) -> Self:
        missing = [name for name in ("action_dim", "state_dim") if getattr(self, name) is None]
        if not self.path and missing:
            raise ValueError(f"a model from scratch needs {' and '.join(missing)}; or set path")
        if not self.path and self.train != "all":
            raise ValueError('train = "expert" freezes what was learnt before; set path to a model')
        if self.lora is not None and not self.path:
            raise ValueError("lora adapts what was learnt before; set path to a model")
        if self.lora is not None and self.train != "all":
            raise ValueError('train = "expert" and lora both say what is trained; leave out one of them')
        return self

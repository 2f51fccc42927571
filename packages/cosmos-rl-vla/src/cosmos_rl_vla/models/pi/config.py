"""Configuration of a pi0 or pi0.5 model, as saved in its config.json. No torch here."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

Kind = Literal["sde", "cps", "learned", "fixed"]
Steps = Literal["random", "last", "all"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Noise:
    """The denoising steps that sample, and their noise level. All others follow the ODE."""

    kind: Kind = "fixed"
    level: float = 0.3
    """sde: a of sigma. cps: 0 .. 1, a right angle at 1. fixed: the std. learned: not read."""
    level_end: float | None = None
    """Level after a linear schedule over `level_steps` optimizer steps; None: constant."""
    level_steps: int = 0
    steps: Steps = "last"
    """random: one step per decision, uniformly. last: the step that ends at the action. all: every step, with the
    initial noise; the log-prob is the mean over them."""
    ignore_last: bool = False
    """The last step follows the ODE: "random" never picks it, "all" counts the steps before it."""
    std_low: float = 0.08
    """learned: minimum standard deviation."""
    std_high: float = 0.16
    """learned: maximum standard deviation."""

    def level_at(self, version: int) -> float:
        """Return the noise level at a version of the weights."""
        if self.level_end is None:
            return self.level
        return self.level + (self.level_end - self.level) * min(max(version, 0) / self.level_steps, 1)

    def check(self, num_steps: int) -> None:
        """Raise ValueError for options out of range, and if none of K denoising steps would sample."""
        if self.kind == "cps" and self.steps == "last":
            raise ValueError(
                'noise "cps" samples nothing at the last step: set steps to "random" or "all", or use another kind'
            )
        if self.ignore_last and self.steps == "last":
            raise ValueError(
                'ignore_last leaves steps = "last" without a step: set steps to "random" or "all", or remove it'
            )
        if self.kind == "cps" and num_steps == 1:
            raise ValueError('noise "cps" samples nothing in a single denoising step: use 2 or more, or another kind')
        if self.ignore_last and num_steps == 1:
            raise ValueError("ignore_last needs 2 or more denoising steps")
        if not 0 < self.std_low <= self.std_high:
            raise ValueError(f"std_low {self.std_low} and std_high {self.std_high}: needs 0 < std_low <= std_high")
        for level in (self.level, self.level if self.level_end is None else self.level_end):
            if level <= 0 or (self.kind == "cps" and level > 1):
                raise ValueError(f'level {level} of noise "{self.kind}": must be above 0, and at most 1 for cps')
        if (self.level_end is None) != (self.level_steps == 0):
            raise ValueError("set level_end and level_steps together: the final level, and the steps until it")
        if self.kind == "learned" and self.level_end is not None:
            raise ValueError('level_end: noise "learned" has no level; set std_low and std_high')

    def num_stochastic(self, num_steps: int) -> int:
        """Return n: steps 0 .. n - 1 may sample."""
        return num_steps - self.ignore_last


Family = Literal["pi0", "pi05"]

MAX_TOKENS = {"words": 24, "pi0": 48, "pi05": 200}
"""Maximum prompt tokens by template, as in openpi."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmaSize:
    """Sizes of a Gemma network."""

    width: int
    depth: int
    mlp: int
    heads: int
    kv_heads: int
    head_dim: int


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionSize:
    """Sizes of a SigLIP tower."""

    image_size: int
    """Side in pixels; images are resized into it with their aspect ratio."""
    patch_size: int
    width: int
    depth: int
    mlp: int
    heads: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueSize:
    """Configuration of the critic."""

    place: Literal["prefix", "expert", "none"] = "prefix"
    """Input of the head: the language model's outputs, or the expert's at the executed actions."""
    per: Literal["chunk", "action"] = "chunk"
    """One value per decision, or one per executed action."""
    pool: Literal["mean", "attention"] = "mean"
    """Pooling of token features into one vector: the mean, or attention of learned queries."""
    hidden: tuple[int, ...] = (1024, 512, 256)
    """Widths of the hidden layers."""
    detach: bool = True
    """Stop the critic's gradient at its input: through a shared trunk it would change the policy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PiConfig:
    """Configuration of one pi0 or pi0.5 model."""

    family: Family
    """pi05: time reaches the expert through adaptive norms. pi0: it is mixed into the action tokens."""
    state: Literal["text", "prefix", "suffix", "none"]
    """Input of proprioception: as text in the prompt (pi0.5), as one projected token beside the images, as the
    expert's first token (pi0), or none."""
    prompt: Literal["words", "pi0", "pi05"]
    """Prompt template of an instruction; see `instructions`."""
    vocab_size: int
    vision: VisionSize
    language: GemmaSize
    expert: GemmaSize
    """Its depth, kv_heads and head_dim equal the language model's: the two share attention."""
    horizon: int
    """H: actions executed per decision."""
    action_dim: int
    """D: dimensions of the simulator's actions."""
    model_horizon: int
    """Actions that the network predicts, >= H."""
    model_action_dim: int
    """Action dimensions of the network, >= D; those above D are zero in demonstrations."""
    max_state_dim: int
    """Maximum dimensions of proprioception."""
    num_steps: int
    """K: denoising steps per decision."""
    noise: Noise = field(default_factory=Noise)
    value: ValueSize = field(default_factory=ValueSize)
    aux_dim: int = 0
    """Dimensions of the auxiliary target predicted from the prefix in supervised training; 0: none."""
    prompt_tokens: int | None = None
    """Maximum prompt tokens; None: those of the template."""

    @property
    def max_prompt_tokens(self) -> int:
        """Maximum prompt tokens."""
        return self.prompt_tokens or MAX_TOKENS[self.prompt]

    @property
    def value_dim(self) -> int:
        """V: values per decision."""
        if self.value.place == "none":
            return 0
        return 1 if self.value.per == "chunk" else self.horizon

    def check(self) -> None:
        """Raise ValueError for sizes that do not fit together, naming the key."""
        self.noise.check(self.num_steps)
        shared = ("depth", "kv_heads", "head_dim")
        differing = [name for name in shared if getattr(self.language, name) != getattr(self.expert, name)]
        if differing:
            raise ValueError(
                f"expert and language differ in {', '.join(differing)}: they share attention, make them equal"
            )
        if self.model_horizon < self.horizon:
            raise ValueError(
                f"horizon {self.horizon}: the model predicts {self.model_horizon} actions; set at most that"
            )
        if self.model_action_dim < self.action_dim:
            raise ValueError(
                f"action_dim {self.action_dim}: the model has {self.model_action_dim} dimensions; "
                "use a model made for this simulator"
            )
        if self.vision.image_size % self.vision.patch_size:
            raise ValueError(
                f"image_size {self.vision.image_size} is not a multiple of patch_size {self.vision.patch_size}"
            )


def tiny(
    *, vocab_size: int, horizon: int = 5, action_dim: int = 4, max_state_dim: int = 8, aux_dim: int = 0
) -> PiConfig:
    """Return a pi0.5 of about 0.65 million parameters that trains on a CPU: 64-pixel images, a vocabulary of words."""
    size = GemmaSize(width=96, depth=2, mlp=128, heads=4, kv_heads=1, head_dim=24)
    return PiConfig(
        family="pi05",
        state="prefix",
        prompt="words",
        vocab_size=vocab_size,
        vision=VisionSize(image_size=64, patch_size=16, width=96, depth=2, mlp=128, heads=4),
        language=size,
        expert=size,
        horizon=horizon,
        action_dim=action_dim,
        model_horizon=horizon,
        model_action_dim=action_dim,
        max_state_dim=max_state_dim,
        num_steps=4,
        value=ValueSize(pool="attention", hidden=(128,)),
        aux_dim=aux_dim,
    )


def full(family: Family, *, horizon: int, action_dim: int, model_horizon: int = 50) -> PiConfig:
    """Return the size of the public checkpoints: PaliGemma 3B with an expert of 300 million parameters."""
    return PiConfig(
        family=family,
        state="text" if family == "pi05" else "suffix",
        prompt=family,
        vocab_size=257_152,
        vision=VisionSize(image_size=224, patch_size=14, width=1152, depth=27, mlp=4304, heads=16),
        language=GemmaSize(width=2048, depth=18, mlp=16_384, heads=8, kv_heads=1, head_dim=256),
        expert=GemmaSize(width=1024, depth=18, mlp=4096, heads=8, kv_heads=1, head_dim=256),
        horizon=horizon,
        action_dim=action_dim,
        model_horizon=model_horizon,
        model_action_dim=32,
        max_state_dim=32,
        num_steps=5,
        noise=Noise(kind="sde", level=0.5, steps="random"),
        value=ValueSize(place="prefix" if family == "pi05" else "expert"),
    )

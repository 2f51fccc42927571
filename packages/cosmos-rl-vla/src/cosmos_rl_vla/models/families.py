"""Selects the family of a recipe's model, and initialises or loads it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from torch import Tensor, nn

from cosmos_rl_core.parallel import lora
from cosmos_rl_core.parallel.config import LoraSection
from cosmos_rl_core.storage.json_files import read_json_object
from cosmos_rl_vla.actions import ActionStats
from cosmos_rl_vla.config import UNIT, VLAModelConfig
from cosmos_rl_vla.models.checkpoint import HEADS, WeightNames, read, weight_files
from cosmos_rl_vla.models.loaded import LoadedPolicy
from cosmos_rl_vla.models.openvla.checkpoint import joined
from cosmos_rl_vla.models.openvla.stats import published_stats
from cosmos_rl_vla.models.pi.checkpoint import PiNames

_OPENVLA = ("openvla", "openvla_oft")
_OUTPUT = "lm_head"
"""Excluded from adapters: OpenVLA reads rows of its weight, and pi models have none."""


def load(config: VLAModelConfig, *, stats: ActionStats | None = None, words: Sequence[str] = ()) -> LoadedPolicy:
    """Return the policy of a [model] section, with its weights; see `make`."""
    loaded = make(config, stats=stats, words=words)
    loaded.fill()
    return loaded


def make(
    config: VLAModelConfig, *, stats: ActionStats | None = None, words: Sequence[str] = (), on_meta: bool = False
) -> LoadedPolicy:
    """Return the policy of a [model] section; `LoadedPolicy.fill` reads its weights once it is on its device.

    Args:
        stats: measured on demonstrations; those named by the recipe or stored beside the model take precedence.
        words: instructions of the demonstrations, for the tokenizer of a model from scratch.
        on_meta: leave a directory's weights on meta, for a model that is sharded first; its heads have values.
            `parallel.dtensor.materialise` then allocates this rank's shards.

    Raises UserError for a missing directory, and for sizes or statistics that do not fit.
    """
    family = _family_of(Path(config.path).expanduser()) if config.path else config.family
    known = _stats(config, family=family) or stats
    if family == "mlp":
        from cosmos_rl_vla.models.mlp import make_mlp

        loaded = make_mlp(config, stats=known)
    elif family in _OPENVLA:
        from cosmos_rl_vla.models.openvla.family import make_openvla

        loaded = make_openvla(config, stats=known, words=(*config.words, *words), on_meta=on_meta)
    else:
        from cosmos_rl_vla.models.pi.family import make_pi

        loaded = make_pi(config, stats=known, words=(*config.words, *words), on_meta=on_meta)
    if config.train == "expert":
        _freeze_trunk(loaded)
    if config.lora is not None:
        loaded = replace(loaded, lora=config.lora)
        _add_adapters(loaded.model, config.lora, base=config.path, seed=config.seed)
    return loaded


def export_weights(
    config: VLAModelConfig, tensors: Iterable[tuple[str, Tensor]], *, merge_adapters: bool
) -> Iterable[tuple[str, Tensor]]:
    """Yield weights in the format of public checkpoints; with `merge_adapters` the base with these adapters merged."""
    if config.lora is not None:
        if not merge_adapters:
            return tensors
        directory = Path(config.path).expanduser()
        names = _names_in(directory)
        base = read(weight_files(directory), names=names)
        tensors = lora.merge(base, tensors, scaling=config.lora.scaling, public_name=names.public_name)
    return joined(tensors)


def _add_adapters(module: nn.Module, section: LoraSection, *, base: str, seed: int) -> None:
    """Add adapters to linear layers of `module`, in place, and freeze all but them and the heads.

    Heads that reinforcement learning adds have no base weights: they are trained, sent and saved whole.

    Args:
        base: directory of the model, saved for later loading of the adapters.
        seed: of the values of A, which depend on the seed and the layer's name alone.

    Raises UserError for layers that the module does not have, and if peft is not installed.
    """

    def leave_out(name: str) -> bool:
        return name.startswith(HEADS) or name.rpartition(".")[2] == _OUTPUT

    layers = lora.pick_layers(module, section.target_modules, leave_out=leave_out)
    lora.add_adapters(module, section, layers=layers, package="cosmos-rl-vla", base=base, seed=seed)
    for name, parameter in module.named_parameters():
        if name.startswith(HEADS):
            parameter.requires_grad_(True)


def _names_in(directory: Path) -> WeightNames:
    family = _family_of(directory)
    if family in _OPENVLA:
        from cosmos_rl_vla.models.openvla.family import names_of

        return names_of(directory)
    if family == "mlp":
        return WeightNames()
    from cosmos_rl_vla.models.pi.family import read_config

    return PiNames(read_config(directory).family)


def _stats(config: VLAModelConfig, *, family: str) -> ActionStats | None:
    """Return the statistics named by the recipe, or stored beside the model."""
    if not (config.stats or config.path):
        return None
    if config.stats == UNIT and config.action_dim is not None:
        return ActionStats.unit(config.action_dim)
    place = Path(config.stats or config.path).expanduser()
    if family == "pi":
        from cosmos_rl_vla.models.pi.family import read_config

        family = read_config(Path(config.path).expanduser()).family
    stats = ActionStats.beside(place, family=family) if place.is_dir() else None
    if stats is None and family in _OPENVLA:
        stats = published_stats(place, key=config.unnorm_key)
    return ActionStats.load(place, family=family) if stats is None and config.stats else stats


def _family_of(directory: Path) -> str:
    """Read a directory's family from its config.json."""
    path = directory / "config.json"
    config = read_json_object(path, hint="[model] path is a directory with config.json and weights")
    kind = str(config.get("model_type", config.get("type", "")))
    if kind == "cosmos_rl_mlp":
        return "mlp"
    return "openvla_oft" if kind == "openvla" else "pi"


def _freeze_trunk(loaded: LoadedPolicy) -> None:
    """Freeze the language and vision model."""
    for name, parameter in loaded.model.named_parameters():
        if name.startswith("backbone.paligemma.") or name.startswith("backbone.language"):
            parameter.requires_grad_(False)

"""The layout of a checkpoint, and loading one into a live policy and optimizer, whatever their ranks.

    checkpoints/step_12/
        policy/            files that load the model elsewhere: config, tokenizer; with one process its weights too, so
                           that it is a Hugging Face directory
        model/             weights of a replica of several ranks, a file each (`cosmos-rl export` joins them)
        training/          optimizer state, further sets of weights and random states, a file a rank
        contents.json      the file of every box of every tensor
        state.json         step, position in the prompt stream, and origin: layout and recipe
        manifest.json      SHA-256 of every other file, written last

Tensors are matched by name: weights by their checkpoint names, optimizer state by its parameter's. Nothing is pickled.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from cosmos_rl_core.checkpoint.contents import MODEL, OPTIMIZER, RNG, Contents
from cosmos_rl_core.checkpoint.manifest import TrainState, read_origin, train_state
from cosmos_rl_core.checkpoint.reader import CheckpointReader
from cosmos_rl_core.errors import UserError
from cosmos_rl_core.interfaces import Policy
from cosmos_rl_core.parallel.dtensor import local_part
from cosmos_rl_core.storage.folder import Folder


def live_tensors(policy: Policy, optimizer: Optimizer, *, rank: int = 0) -> dict[str, Tensor]:
    """Return everything a checkpoint holds of this rank by name: weights, optimizer state, random state."""
    tensors = {MODEL + name: tensor for name, tensor in policy.weights().items()}
    for name, parameter in parameter_names(policy, optimizer).items():
        for entry, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                tensors[f"{OPTIMIZER}{name}/{entry}"] = value
    return tensors | {f"{RNG}{rank}/{device}": state for device, state in _rng_states().items()}


def load(location: str | Path | Folder, *, policy: Policy, optimizer: Optimizer, rank: int = 0) -> TrainState:
    """Read weights, optimizer and random state into the live objects, whatever layout wrote them.

    The files are not verified: `manifest.verify` does that. Raises UserError for the checkpoint of another model.
    """
    folder = Folder.at(location)
    with CheckpointReader(folder) as reader:
        model = _model_tensors(reader, {MODEL + name: tensor for name, tensor in policy.weights().items()})
        state = _empty_state(reader.contents, policy, optimizer)
        entries = {name: tensor for by_name in state.values() for name, tensor in by_name.items()}
        random = _empty_rng(reader.contents, rank=rank, saved_ranks=read_origin(folder).num_ranks)
        reader.fill({**model, **entries, **random})
    for parameter, by_name in state.items():
        optimizer.state[parameter] = {name.rpartition("/")[2]: tensor for name, tensor in by_name.items()}
    for name, random_state in random.items():
        _set_rng(name.rpartition("/")[2], random_state)
    return train_state(folder)


def load_weights(location: str | Path | Folder, weights: Mapping[str, Tensor], *, averaged: bool = False) -> None:
    """Fill live tensors by checkpoint name, such as an engine's. Nothing else of the checkpoint is read.

    `averaged` reads the averages of the weights instead, if it holds any. Raises UserError for the checkpoint of
    another model.
    """
    with CheckpointReader(Folder.at(location)) as reader:
        saved = reader.contents.weights(averaged=averaged)
        reader.fill(_model_tensors(reader, {saved.get(name, MODEL + name): live for name, live in weights.items()}))


def parameter_names(policy: Policy, optimizer: Optimizer) -> dict[str, nn.Parameter]:
    """Return the optimizer's parameters by checkpoint name: that of the weight with the same storage.

    A parameter that is no weight of the policy has its name in the module.
    """
    weights = {name: local_part(tensor) for name, tensor in policy.weights().items()}
    storages = {name: tensor.untyped_storage() for name, tensor in weights.items()}  # alive, so that ids are unique
    by_place = {(id(storages[name]), tensor.storage_offset()): name for name, tensor in weights.items()}
    in_module = {parameter: name for name, parameter in policy.module.named_parameters()}
    names: dict[str, nn.Parameter] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            part = local_part(parameter)
            name = by_place.get((id(part.untyped_storage()), part.storage_offset())) or in_module[parameter]
            names[name] = parameter
    return names


def _model_tensors(reader: CheckpointReader, model: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Return live weights by their names in the checkpoint, where they are all there. Raises UserError where not."""
    folder, contents = reader.folder, reader.contents
    missing = sorted(name.removeprefix(MODEL) for name in set(model) - set(contents.tensors))
    if missing:
        first = f"{len(missing)} tensors of this model, first {missing[0]}"
        raise UserError(f"{folder} lacks {first}: is it of another model?")
    for name, live in model.items():
        size = contents.tensors[name].size
        if size != tuple(live.shape):
            raise UserError(
                f"{folder}: {name.removeprefix(MODEL)} is {list(size)} there, {list(live.shape)} in this model: "
                "is it of another model?"
            )
    return model


def _empty_state(contents: Contents, policy: Policy, optimizer: Optimizer) -> dict[nn.Parameter, dict[str, Tensor]]:
    """Empty tensors for the saved optimizer state: sharded as the parameter where it has its shape, whole otherwise."""
    saved: dict[str, list[str]] = {}
    for name in contents.names(OPTIMIZER):
        saved.setdefault(name.removeprefix(OPTIMIZER).rpartition("/")[0], []).append(name)
    fused = {id(p) for group in optimizer.param_groups if group.get("fused") for p in group["params"]}
    state: dict[nn.Parameter, dict[str, Tensor]] = {}
    for name, parameter in parameter_names(policy, optimizer).items():
        where = parameter.device if id(parameter) in fused else torch.device("cpu")  # of step counters
        for key in saved.get(name, ()):
            entry = contents.tensors[key]
            like_parameter = entry.size == tuple(parameter.shape)
            room = (
                torch.zeros_like(parameter, requires_grad=False)
                if like_parameter
                else torch.zeros(entry.size, dtype=entry.torch_dtype, device=where)
            )
            state.setdefault(parameter, {})[key] = room
    return state


def _empty_rng(contents: Contents, *, rank: int, saved_ranks: int) -> dict[str, Tensor]:
    """Empty tensors for this rank's random states; with more ranks than saved states, the states are used again."""
    ours = f"{RNG}{rank % saved_ranks}/"
    states = {name: contents.tensors[name] for name in contents.names(ours)}
    devices = set(_rng_states())
    return {
        name: torch.empty(entry.size, dtype=torch.uint8)
        for name, entry in states.items()
        if name.removeprefix(ours) in devices
    }


def _rng_states() -> dict[str, Tensor]:
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def _set_rng(device: str, state: Tensor) -> None:
    if device == "cuda":
        torch.cuda.set_rng_state(state)
    else:
        torch.set_rng_state(state)

"""Resolves a [model] section to its folder, and class and configuration of network and autoencoder. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cosmos_rl_core.errors import UserError
from cosmos_rl_wfm.models.classes import check_network, check_scheduler, class_of, network_class
from cosmos_rl_wfm.models.config import FamilyName, WFMModelConfig
from cosmos_rl_wfm.models.folder import NETWORK, ModelFolder, open_folder
from cosmos_rl_wfm.models.networks.tiny import tiny_network, tiny_vae


def is_here(config: WFMModelConfig) -> bool:
    """Whether the model is on this machine or made from scratch."""
    return not config.path or Path(config.path).expanduser().is_dir()


def open_source(config: WFMModelConfig, parts: Sequence[str] = ()) -> ModelFolder | None:
    """Open the model's folder, downloaded if needed with only `parts`; None for a model from scratch.

    Raises UserError for a model that does not exist, or is no flow-matching model.
    """
    if not config.path:
        return None
    folder = open_folder(config.path, revision=config.revision, parts=parts)
    if "transformer_2" in folder.classes:
        raise UserError(
            f"model.path = {config.path!r} has two networks, for high and for low noise (Wan2.2 14B), which is not "
            "supported; give a model with one, such as Wan2.1"
        )
    if folder.has("scheduler"):
        check_scheduler(folder.config("scheduler"))
    return folder


def network_of(config: WFMModelConfig, folder: ModelFolder | None) -> tuple[str, dict[str, Any]]:
    """Return class and arguments of the network. Raises UserError for a class that is not supported."""
    if folder is None:
        values = tiny_network(_named_family(config), codec=config.codec) if config.tiny else {}
        values |= config.network
        class_name = values.pop("_class_name", None) or class_of(_named_family(config))
    else:
        class_name, values = folder.classes[NETWORK][1], folder.config(NETWORK)
    check_network(class_name, claimed=config.family == "flow")
    row = network_class(class_name)
    found = "flow" if row is None else row.family
    if config.family not in ("auto", found):
        where = f"model.path = {config.path!r} has" if config.path else "model.network names"
        raise UserError(
            f'model.family = "{config.family}", but {where} a {class_name}, of "{found}"; set family = "{found}"'
        )
    return class_name, values


def vae_of(config: WFMModelConfig, folder: ModelFolder | None) -> tuple[str, dict[str, Any]]:
    """Return class and arguments of the autoencoder. Raises UserError for a model without one."""
    if folder is None:
        return tiny_vae(_named_family(config))
    if not folder.has("vae"):
        raise UserError(
            f"model.path = {config.path!r} has no vae, so it cannot encode video: give the folder of a whole pipeline, "
            'or set codec = "pixels" for a network of pixels'
        )
    return folder.classes["vae"][1], folder.config("vae")


def _named_family(config: WFMModelConfig) -> FamilyName:
    assert config.family != "auto", "the config lets no model from scratch leave it open"
    return config.family

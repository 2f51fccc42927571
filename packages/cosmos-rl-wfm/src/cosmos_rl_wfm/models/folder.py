"""The source of a [model] section: a diffusers folder of a pipeline or a single network, or none. No torch.

model_index.json        {"_class_name": "WanPipeline", "transformer": ["diffusers", "WanTransformer3DModel"], ...}
transformer/            config.json {"_class_name": ...}, diffusion_pytorch_model.safetensors
vae/  scheduler/  text_encoder/  tokenizer/  ...
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cosmos_rl_core.errors import UserError
from cosmos_rl_core.settings.problems import neighbour
from cosmos_rl_core.storage import hub
from cosmos_rl_core.storage.json_files import read_json_object
from cosmos_rl_wfm.models.classes import check_network, check_scheduler, class_of, network_class
from cosmos_rl_wfm.models.config import FamilyName, WFMModelConfig
from cosmos_rl_wfm.models.networks.tiny import tiny_network, tiny_vae

INDEX = "model_index.json"
NETWORK = "transformer"
"""The part of a pipeline that is trained."""
WEIGHTS = "diffusion_pytorch_model.safetensors"
"""File name of a model's weights in diffusers."""

_SMALL_FILES = ("*.json", "*.txt", "*.model", "*.jinja")
_SAFETENSORS = "*.safetensors"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFolder:
    """The folder of a model and its parts."""

    root: Path
    classes: Mapping[str, tuple[str, str]]
    """Library and class by part: {"transformer": ("diffusers", "WanTransformer3DModel")}."""
    is_pipeline: bool
    """False for a single network, whose files are in the root itself."""

    def part(self, name: str) -> Path:
        """Return the folder of a part. Raises UserError, with the existing parts, for a missing one."""
        directory = self.root / name if self.is_pipeline else self.root
        if name not in self.classes or not directory.is_dir():
            known = ", ".join(sorted(self.classes))
            raise UserError(f"model.path = {str(self.root)!r} has no {name}; it has {known}")
        return directory

    def has(self, name: str) -> bool:
        """Whether the part exists."""
        return name in self.classes and (not self.is_pipeline or (self.root / name).is_dir())

    def config(self, name: str) -> dict[str, Any]:
        """Return the part's configuration, {} where it has none. Raises UserError for a file that is not JSON."""
        directory = self.part(name)
        for file in ("config.json", "scheduler_config.json"):
            if (directory / file).is_file():
                return _read(directory / file)
        return {}

    def weights(self, name: str, *, missing_ok: bool = False) -> list[Path]:
        """Return the safetensors of a part. Raises UserError where there are none, or several sets of them.

        missing_ok: return none where there are none.
        """
        directory = self.part(name)
        places = [directory, self.root] if name == NETWORK else [directory]
        for place in places:
            if files := _safetensors(place):
                return files
        if missing_ok:
            return []
        raise UserError(
            f"model.path: {directory} has no safetensors of the {name}; only that format is read, so convert others "
            f"(save_pretrained of diffusers writes {WEIGHTS})"
        )

    def copy_others(self, directory: Path, *, weights: bool) -> None:
        """Write the index of a pipeline and its parts other than the network, with or without their weights."""
        present = [name for name in self.classes if name != NETWORK and self.has(name)]
        missing = {name: [None, None] for name in self.classes if name not in (NETWORK, *present)}
        directory.mkdir(parents=True, exist_ok=True)
        (directory / INDEX).write_text(json.dumps({**_read(self.root / INDEX), **missing}, indent=2) + "\n")
        for name in present:
            (directory / name).mkdir(exist_ok=True)
            small = [file for pattern in _SMALL_FILES for file in self.part(name).glob(pattern)]
            for file in (*small, *(self.weights(name, missing_ok=True) if weights else [])):
                shutil.copyfile(file, directory / name / file.name)


def open_folder(path: str, *, revision: str | None = None, parts: Sequence[str] = ()) -> ModelFolder:
    """Open a local folder, or download `parts` (all when empty) of a model on the hub and open that.

    Raises UserError for a path that does not exist, is no model of diffusers, or cannot be downloaded.
    """
    local = Path(path).expanduser()
    if local.is_dir():
        if revision is not None:
            raise UserError(f"model.revision is for a model id on the hub; model.path = {path!r} is a directory here")
        return _open(local)
    must_be_hub_id(path)
    return _open(_fetch(path, revision=revision, parts=parts))


def must_be_hub_id(path: str) -> None:
    """Raise UserError for a path that is not a directory, and cannot be the id of a model on the hub."""
    local = Path(path).expanduser()
    if local.is_absolute() or path.startswith((".", "~")) or path.count("/") != 1 or local.exists():
        remedy = neighbour(local) or (
            "give one that diffusers' save_pretrained wrote, or a hub's id such as Wan-AI/Wan2.1-T2V-1.3B-Diffusers"
        )
        raise UserError(f"model.path = {path!r} is not a directory; {remedy}")


def _open(root: Path) -> ModelFolder:
    if (root / "adapter_config.json").is_file():
        raise UserError(
            f"model.path = {str(root)!r} contains adapters of another model; give that model, or the "
            "merged one that `cosmos-rl export --merge-adapters` writes"
        )
    if (root / INDEX).is_file():
        listed = {key: value for key, value in _read(root / INDEX).items() if isinstance(value, list)}
        classes = {key: (str(value[0]), str(value[1])) for key, value in listed.items() if all(value)}
        if NETWORK not in classes:
            raise UserError(
                f"model.path = {str(root)!r}: {INDEX} names no {NETWORK}; only pipelines with one are trained"
            )
        return ModelFolder(root=root, classes=classes, is_pipeline=True)
    name = _read(root / "config.json").get("_class_name") if (root / "config.json").is_file() else None
    if name is None:
        raise UserError(
            f"model.path = {str(root)!r} has neither {INDEX} nor a config.json with _class_name: it is no diffusers "
            "model; give the folder of a pipeline, or of its transformer"
        )
    return ModelFolder(root=root, classes={NETWORK: ("diffusers", str(name))}, is_pipeline=False)


def _read(file: Path) -> dict[str, Any]:
    return read_json_object(file, hint="see model.path")


def _safetensors(place: Path) -> list[Path]:
    """The files of one set of weights: of the set without a variant such as fp16 in its name, if there is one."""
    for name in (WEIGHTS, "model.safetensors"):
        if (place / f"{name}.index.json").is_file():
            return _listed(place / f"{name}.index.json")
        if (place / name).is_file():
            return [place / name]
    for index in sorted(place.glob("[!.]*.safetensors.index.json")):
        return _listed(index)
    files = sorted(place.glob(f"[!.]{_SAFETENSORS}"))
    if len(files) > 1:
        names = ", ".join(file.name for file in files)
        raise UserError(f"model.path: {place} has several sets of weights ({names}); keep one, called {WEIGHTS}")
    return files


def _listed(index: Path) -> list[Path]:
    return sorted({index.parent / name for name in _read(index)["weight_map"].values()})


def _fetch(model_id: str, *, revision: str | None, parts: Sequence[str]) -> Path:
    from huggingface_hub import snapshot_download

    hub.must_be_quiet()
    kinds: list[str] = [_SAFETENSORS, *_SMALL_FILES]
    patterns = ["*.json", *(f"{part}/{kind}" for part in parts for kind in kinds)] if parts else kinds
    try:
        return Path(snapshot_download(model_id, revision=revision, allow_patterns=patterns))
    except (OSError, ValueError) as error:
        where = f"model.path = {model_id!r}" + (f" at model.revision = {revision!r}" if revision else "")
        raise UserError(
            f"{where} cannot be fetched from the hub ({error}); give a folder that is on this machine"
        ) from error


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
        check_scheduler(folder.config("scheduler"), shift=config.shift)
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
    kind = "flow" if row is None else row.family
    if config.family not in ("auto", kind):
        where = f"model.path = {config.path!r} has" if config.path else "model.network names"
        raise UserError(
            f'model.family = "{config.family}", but {where} a {class_name}, of "{kind}"; set family = "{kind}"'
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

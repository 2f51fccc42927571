"""Maps weight names of OpenVLA between public checkpoints and the module: they differ inside the vision towers alone.

    vision_backbone.featurizer.blocks.0.attn.qkv.weight                    theirs (timm): queries, keys, values in one
    vision_backbone.featurizer.encoder.layer.0.attention.q_proj.weight     ours (transformers)

In weight syncs and checkpoints a third of a fused tensor is named ".attn.q.", ".attn.k." or ".attn.v."; `joined`
restores the public form. A tower's last block, norm and pooling are in public files but not used.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from cosmos_rl_vla.models.checkpoint import Owner, WeightNames
from cosmos_rl_vla.models.openvla.config import TowerKind, TowerSize

_BLOCKS: Mapping[TowerKind, str] = {"dinov2": "encoder.layer.", "siglip": "encoder.layers."}
_PARTS: Mapping[TowerKind, Mapping[str, str]] = {
    "dinov2": {
        "norm1": "norm1",
        "attn.q": "attention.q_proj",
        "attn.k": "attention.k_proj",
        "attn.v": "attention.v_proj",
        "attn.proj": "attention.o_proj",
        "ls1.scale_factor": "layer_scale1.lambda1",
        "norm2": "norm2",
        "mlp.fc1": "mlp.fc1",
        "mlp.fc2": "mlp.fc2",
        "ls2.scale_factor": "layer_scale2.lambda1",
    },
    "siglip": {
        "norm1": "layer_norm1",
        "attn.q": "self_attn.q_proj",
        "attn.k": "self_attn.k_proj",
        "attn.v": "self_attn.v_proj",
        "attn.proj": "self_attn.out_proj",
        "norm2": "layer_norm2",
        "mlp.fc1": "mlp.fc1",
        "mlp.fc2": "mlp.fc2",
    },
}
"""Parts of a block: public name -> module's name."""
_PLACES = ("vision_backbone.featurizer.", "vision_backbone.fused_featurizer.")
_TOWER = re.compile(r"vision_backbone\.(?:fused_)?featurizer\.")
_FUSED = re.compile(r"(?P<before>.*\.attn\.)qkv(?P<after>\.\w+)")
_THIRD = re.compile(r"(?P<before>vision_backbone\..*\.attn\.)(?P<which>[qkv])(?P<after>\.\w+)")
_BLOCK = re.compile(r"blocks\.(?P<number>\d+)\.(?P<rest>.+)")
_UNUSED = ("norm.", "fc_norm.", "attn_pool.", "head.", "mask_token")
"""Parts of a tower after its features."""
_PLAIN = ("projector.", "language_model.", "proprio_projector.", "value_head.")
HINT = "check that config.json and the weights belong together"


class OpenVLANames(WeightNames):
    """Both directions of the map."""

    def __init__(self, towers: Sequence[TowerSize]) -> None:
        self._towers: dict[str, TowerSize] = dict(zip(_PLACES, towers, strict=True))

    def public_name(self, name: str) -> str:
        """Return the public name of a parameter; for queries, keys and values, of a third of a fused tensor."""
        if not (match := _TOWER.match(name)):
            return name
        kind, rest = self._towers[match[0]].kind, name[match.end() :]
        if not rest.startswith(_BLOCKS[kind]):
            return name
        number, _, part = rest.removeprefix(_BLOCKS[kind]).partition(".")
        for theirs, ours in _PARTS[kind].items():
            if part == ours or part.startswith(f"{ours}."):
                return f"{match[0]}blocks.{number}.{theirs}{part.removeprefix(ours)}"
        raise AssertionError(name)

    def owners(self, name: str) -> tuple[Owner, ...]:
        """Return the parameters of a public tensor, or of a third of one."""
        match = _TOWER.match(name)
        if match is None:
            if not name.startswith(_PLAIN):
                raise KeyError(name)
            return () if name.endswith(".rotary_emb.inv_freq") else (Owner(name),)
        tower, rest = self._towers[match[0]], name[match.end() :]
        if rest.startswith(_UNUSED):
            return ()
        block = _BLOCK.fullmatch(rest)
        if block is None:
            return (Owner(name),)
        number, part = int(block["number"]), block["rest"].replace(".gamma", ".scale_factor")
        if number >= tower.depth:
            raise KeyError(name)
        if number == tower.depth - 1:
            return ()
        before = f"{match[0]}{_BLOCKS[tower.kind]}{number}."
        if fused := _FUSED.fullmatch(f".{part}"):
            thirds = (f"attn.{which}" for which in "qkv")
            return tuple(
                Owner(f"{before}{_PARTS[tower.kind][third]}{fused['after']}", place, 3)
                for place, third in enumerate(thirds)
            )
        for theirs, ours in _PARTS[tower.kind].items():
            if part == theirs or part.startswith(f"{theirs}."):
                return (Owner(f"{before}{ours}{part.removeprefix(theirs)}"),)
        raise KeyError(name)


def joined(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yield weights with queries, keys and values fused, as in public checkpoints; others unchanged."""
    waiting: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors:
        third = _THIRD.fullmatch(name)
        if third is None:
            yield name, tensor
            continue
        fused = f"{third['before']}qkv{third['after']}"
        thirds = waiting.setdefault(fused, {})
        thirds[third["which"]] = tensor
        if len(thirds) == 3:
            yield fused, torch.cat([thirds[which] for which in "qkv"])
            del waiting[fused]
    assert not waiting, f"only a part of {min(waiting)}"

"""Names, shapes and dtypes of a model's tensors, from a preset or from files; no tensor is read.

    llama-8b                          a preset (`PRESETS`)
    model.safetensors.index.json      the headers of the files that it names, in the same folder
    model.safetensors                 its header
    config.json                       arithmetic, for the families of `decoder_of`
    a folder                          the first of these files that it has

The arithmetic gives the tensors of a checkpoint on the Hugging Face hub, one tensor per expert:

    model.embed_tokens   [V, H]
    model.layers.i       input_layernorm, self_attn, post_attention_layernorm, mlp        i < layers
    model.norm           [H]
    lm_head              [V, H], unless tied to the embedding

Models published in float8 are listed as they are trained, in bfloat16 without scales; layers that only predict further
tokens (MTP) are left out.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from cosmos_rl_core.errors import UserError
from cosmos_rl_core.storage.safetensors_header import read_header
from cosmos_rl_core.types import WeightSpec
from cosmos_rl_transfer.errors import LayoutError
from cosmos_rl_transfer.layout.manifest import ITEM_BYTES

Entry = tuple[str, tuple[int, ...]]
"""Name and shape."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Latent:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1): ranks and head sizes."""

    query: int
    key_value: int
    plain: int
    """Of a head of queries and keys, the part without position."""
    rotary: int
    value: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoder:
    """Sizes of a decoder-only language model."""

    vocab: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head: int
    """Elements of a head."""
    ffn: int
    """Inner size of a dense layer."""
    tied: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    latent: Latent | None = None
    experts: int = 0
    expert_ffn: int = 0
    shared_experts: int = 0
    dense_layers: int = 0
    """Layers before the first one with experts."""

    def specs(self) -> tuple[WeightSpec, ...]:
        """Return every tensor of the checkpoint, in the order of the forward pass."""
        return tuple(
            WeightSpec(name=name, shape=shape, dtype="float32" if name.endswith("correction_bias") else "bfloat16")
            for name, shape in self._entries()
        )

    def _entries(self) -> Iterator[Entry]:
        yield "model.embed_tokens.weight", (self.vocab, self.hidden)
        for layer in range(self.layers):
            has_experts = self.experts > 0 and layer >= self.dense_layers
            for name, shape in self._layer(has_experts=has_experts):
                yield f"model.layers.{layer}.{name}", shape
        yield "model.norm.weight", (self.hidden,)
        if not self.tied:
            yield "lm_head.weight", (self.vocab, self.hidden)

    def _layer(self, *, has_experts: bool) -> Iterator[Entry]:
        yield "input_layernorm.weight", (self.hidden,)
        attention = self._attention() if self.latent is None else self._latent_attention(self.latent)
        for name, shape in attention:
            yield f"self_attn.{name}", shape
        yield "post_attention_layernorm.weight", (self.hidden,)
        for name, shape in self._experts() if has_experts else self._gated(self.ffn):
            yield f"mlp.{name}", shape

    def _attention(self) -> Iterator[Entry]:
        rows = {"q": self.heads * self.head, "k": self.kv_heads * self.head, "v": self.kv_heads * self.head}
        for part, size in rows.items():
            yield f"{part}_proj.weight", (size, self.hidden)
            if self.qkv_bias:
                yield f"{part}_proj.bias", (size,)
        if self.qk_norm:
            yield "q_norm.weight", (self.head,)
            yield "k_norm.weight", (self.head,)
        yield "o_proj.weight", (self.hidden, self.heads * self.head)

    def _latent_attention(self, latent: Latent) -> Iterator[Entry]:
        yield "q_a_proj.weight", (latent.query, self.hidden)
        yield "q_a_layernorm.weight", (latent.query,)
        yield "q_b_proj.weight", (self.heads * (latent.plain + latent.rotary), latent.query)
        yield "kv_a_proj_with_mqa.weight", (latent.key_value + latent.rotary, self.hidden)
        yield "kv_a_layernorm.weight", (latent.key_value,)
        yield "kv_b_proj.weight", (self.heads * (latent.plain + latent.value), latent.key_value)
        yield "o_proj.weight", (self.hidden, self.heads * latent.value)

    def _experts(self) -> Iterator[Entry]:
        yield "gate.weight", (self.experts, self.hidden)
        if self.latent is not None:  # DeepSeek-V3's balance without a loss
            yield "gate.e_score_correction_bias", (self.experts,)
        for expert in range(self.experts):
            for name, shape in self._gated(self.expert_ffn):
                yield f"experts.{expert}.{name}", shape
        if self.shared_experts:
            for name, shape in self._gated(self.shared_experts * self.expert_ffn):
                yield f"shared_experts.{name}", shape

    def _gated(self, inner: int) -> Iterator[Entry]:
        yield "gate_proj.weight", (inner, self.hidden)
        yield "up_proj.weight", (inner, self.hidden)
        yield "down_proj.weight", (self.hidden, inner)


_DEEPSEEK = Latent(query=1536, key_value=512, plain=128, rotary=64, value=128)

PRESETS = {
    "smollm2-135m": Decoder(
        vocab=49152, hidden=576, layers=30, heads=9, kv_heads=3, head=64, ffn=1536, tied=True
    ),
    "llama-8b": Decoder(vocab=128256, hidden=4096, layers=32, heads=32, kv_heads=8, head=128, ffn=14336),
    "llama-70b": Decoder(vocab=128256, hidden=8192, layers=80, heads=64, kv_heads=8, head=128, ffn=28672),
    "qwen3-30b-a3b": Decoder(
        vocab=151936, hidden=2048, layers=48, heads=32, kv_heads=4, head=128, ffn=6144, qk_norm=True,
        experts=128, expert_ffn=768,
    ),
    "qwen3-235b-a22b": Decoder(
        vocab=151936, hidden=4096, layers=94, heads=64, kv_heads=4, head=128, ffn=12288, qk_norm=True,
        experts=128, expert_ffn=1536,
    ),
    "deepseek-v3": Decoder(
        vocab=129280, hidden=7168, layers=61, heads=128, kv_heads=128, head=192, ffn=18432, latent=_DEEPSEEK,
        experts=256, expert_ffn=2048, shared_experts=1, dense_layers=3,
    ),
    "kimi-k2": Decoder(
        vocab=163840, hidden=7168, layers=61, heads=64, kv_heads=64, head=192, ffn=18432, latent=_DEEPSEEK,
        experts=384, expert_ffn=2048, shared_experts=1, dense_layers=1,
    ),
}  # fmt: skip
"""By name, from their published configurations."""

_QK_NORM = ("qwen3", "qwen3_moe")
_FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "deepseek_v3", "kimi_k2")


def decoder_of(config: Mapping[str, Any]) -> Decoder:
    """Read a Hugging Face config.json of a family that this arithmetic covers.

    Raises LayoutError for another family or a key that is not there.
    """
    family = config.get("model_type")
    if family not in _FAMILIES:
        raise LayoutError(
            f"model_type {family!r} is not known here ({', '.join(_FAMILIES)}); "
            "give the checkpoint's model.safetensors.index.json instead"
        )
    try:
        heads = config["num_attention_heads"]
        return Decoder(
            vocab=config["vocab_size"],
            hidden=config["hidden_size"],
            layers=config["num_hidden_layers"],
            heads=heads,
            kv_heads=config.get("num_key_value_heads") or heads,
            head=config.get("head_dim") or config["hidden_size"] // heads,
            ffn=config["intermediate_size"],
            tied=bool(config.get("tie_word_embeddings")),
            qkv_bias=family == "qwen2",
            qk_norm=family in _QK_NORM,
            latent=_latent(config) if "kv_lora_rank" in config else None,
            experts=config.get("n_routed_experts") or config.get("num_experts") or 0,
            expert_ffn=config.get("moe_intermediate_size") or 0,
            shared_experts=config.get("n_shared_experts") or 0,
            dense_layers=config.get("first_k_dense_replace") or 0,
        )
    except KeyError as error:
        raise LayoutError(f"the config.json of a {family} model lacks {error}") from error


def _latent(config: Mapping[str, Any]) -> Latent:
    return Latent(
        query=config["q_lora_rank"],
        key_value=config["kv_lora_rank"],
        plain=config["qk_nope_head_dim"],
        rotary=config["qk_rope_head_dim"],
        value=config["v_head_dim"],
    )


_DTYPES = {
    "F64": "float64", "F32": "float32", "BF16": "bfloat16", "F16": "float16", "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2", "I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8", "U8": "uint8",
    "BOOL": "bool",
}  # fmt: skip
_FILES = ("model.safetensors.index.json", "model.safetensors", "config.json")


@dataclass(frozen=True, slots=True, kw_only=True)
class Shapes:
    """The tensors of a model."""

    name: str
    specs: tuple[WeightSpec, ...]
    """In the order of the forward pass, as far as it is known."""
    kv_heads: int | None = None
    """Key-value heads, which tensor parallelism keeps whole; None where nobody says."""

    @classmethod
    def of(cls, decoder: Decoder, *, name: str) -> Shapes:
        """Return the shapes of a model of these sizes."""
        return cls(name=name, specs=decoder.specs(), kv_heads=None if decoder.latent else decoder.kv_heads)

    @property
    def num_parameters(self) -> int:
        return sum(math.prod(spec.shape) for spec in self.specs)

    @property
    def num_bytes(self) -> int:
        return sum(math.prod(spec.shape) * ITEM_BYTES[spec.dtype] for spec in self.specs)


def read_shapes(given: str) -> Shapes:
    """Return the shapes of a preset, a file or a folder. Raises LayoutError that says what would be known."""
    if given in PRESETS:
        return Shapes.of(PRESETS[given], name=given)
    path = Path(given).expanduser()
    if path.is_dir():
        path = next((path / name for name in _FILES if (path / name).exists()), path / _FILES[0])
    if not path.exists():
        close = difflib.get_close_matches(given, PRESETS, n=1)
        hint = f" (did you mean {close[0]}?)" if close else ""
        raise LayoutError(
            f"{given!r} is no file and no preset{hint}; known: {', '.join(PRESETS)}, "
            "or the path of a model.safetensors.index.json, a .safetensors file or a config.json"
        )
    if path.suffix == ".safetensors":
        return Shapes(name=path.name, specs=_in_order(_header(path)), kv_heads=_kv_heads(path))
    content = _json(path)
    if "weight_map" in content:
        return Shapes(name=path.parent.name or path.name, specs=_indexed(path, content), kv_heads=_kv_heads(path))
    return Shapes.of(decoder_of(_language(content)), name=path.parent.name or path.name)


def _indexed(path: Path, index: dict[str, Any]) -> tuple[WeightSpec, ...]:
    """Read the headers of all files that an index names."""
    files = sorted(set(index["weight_map"].values()))
    if missing := [name for name in files if not (path.parent / name).exists()]:
        raise LayoutError(
            f"{path} names {missing[0]}, which is not beside it ({len(missing)} of {len(files)} files are missing): "
            "their headers hold the shapes"
        )
    return _in_order(spec for name in files for spec in _header(path.parent / name))


def _header(path: Path) -> Iterator[WeightSpec]:
    """Yield the tensors that the header of a safetensors file names."""
    try:
        with path.open("rb") as file:
            places = read_header(file, name=str(path), alone=True)
    except UserError as error:
        raise LayoutError(str(error)) from error
    for name, place in places.items():
        if place.dtype not in _DTYPES:
            raise LayoutError(f"{path}: {name} has dtype {place.dtype}; known: {', '.join(_DTYPES)}")
        yield WeightSpec(name=name, shape=place.shape, dtype=_DTYPES[place.dtype])


def _json(path: Path) -> dict[str, Any]:
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise LayoutError(f"{path} is neither a safetensors file nor JSON with one object ({error})") from error


def _kv_heads(path: Path) -> int | None:
    """Return what a config.json beside `path` says."""
    config = path.parent / "config.json"
    if not config.exists():
        return None
    language = _language(_json(config))
    return None if "kv_lora_rank" in language else language.get("num_key_value_heads")


def _language(config: dict[str, Any]) -> dict[str, Any]:
    """Return the part of a configuration that describes the language model."""
    return config.get("text_config") or config


def _in_order(specs: Iterable[WeightSpec]) -> tuple[WeightSpec, ...]:
    """Sort into the order of the forward pass, by name: the embedding, layer 9, layer 10, what follows."""

    def place(spec: WeightSpec) -> tuple[int, list[tuple[int, int | str]]]:
        parts = re.split(r"(\d+)", spec.name)
        outside = 0 if "embed" in spec.name else 2
        return (1 if len(parts) > 1 else outside), [(0, int(p)) if p.isdigit() else (1, p) for p in parts]

    return tuple(sorted(specs, key=place))

"""Caption encoders of diffusers' pipelines, each as its own pipeline embeds a prompt.

UMT5, T5        Wan, older Cosmos: last hidden states, zero after the caption
Qwen2.5-VL      Cosmos-Predict2.5: a chat, hidden states of all layers concatenated, no mask
CLIP x 2 + T5   SD3: tokens of both CLIPs and of T5, and the CLIPs' pooled vectors
Gemma           Sana: last hidden states and their mask
"""

from __future__ import annotations

import html
import re
import zlib
from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cosmos_rl_core.errors import UserError
from cosmos_rl_core.parallel.device import pinned
from cosmos_rl_wfm.models.base import Condition
from cosmos_rl_wfm.models.folder import ModelFolder

_SYSTEM = "You are a helpful assistant who will provide prompts to an image generator."
"""Instruction before every caption of Predict2.5."""


class CaptionEncoder(ABC):
    """captions -> Condition with text [B, L, E] and mask [B, L], on the encoder's device."""

    modules: Sequence[nn.Module] = ()
    """Networks of the encoder."""

    @abstractmethod
    def __call__(self, captions: Sequence[str]) -> Condition:
        """Embed captions, without gradient."""


def load_captions(
    folder: ModelFolder,
    *,
    dtype: torch.dtype,
    device: torch.device,
    length: int,
    instruction: str,
    negative_prompt: str = "",
) -> CaptionEncoder:
    """Load a pipeline's tokenizers and encoders; `instruction` precedes all captions except the negative prompt.

    Raises UserError for one that is missing or not supported.
    """

    def part(name: str) -> Any:
        return load_part(folder, name, dtype=dtype).to(device)

    def tokenizer(name: str = "tokenizer") -> Any:
        return load_part(folder, name, dtype=None)

    if folder.has("text_encoder_3"):
        return _StableDiffusion3(
            clips=[(tokenizer(), part("text_encoder")), (tokenizer("tokenizer_2"), part("text_encoder_2"))],
            t5=(tokenizer("tokenizer_3"), part("text_encoder_3")),
            length=length,
        )
    folder.part("text_encoder")
    kind = folder.classes["text_encoder"][1]
    if kind in ("UMT5EncoderModel", "T5EncoderModel"):
        return _T5(tokenizer(), part("text_encoder"), length=length)
    if kind.startswith("Qwen2_5_VL"):
        return _Qwen(tokenizer(), part("text_encoder"), length=length)
    if kind.startswith("Gemma"):
        return _Gemma(
            tokenizer(), part("text_encoder"), length=length, instruction=instruction, bare={"", negative_prompt}
        )
    raise UserError(
        f"model.path: the text encoder {kind} is not supported (UMT5, T5, Qwen2.5-VL, CLIP + T5 and Gemma are); embed "
        'the captions beforehand and set text.encoder = "cached"'
    )


class OffloadedCaptions(CaptionEncoder):
    """An encoder with its weights in host memory, pinned for a GPU; on the device only while it embeds."""

    def __init__(self, encoder: CaptionEncoder, *, device: torch.device) -> None:
        """encoder: loaded on the CPU."""
        self._encoder, self._device, self.modules = encoder, device, encoder.modules
        self._slots: list[tuple[nn.Module, str, int]] = []
        """Where a tensor belongs: module, name, index in `_host`; tied tensors have one index."""
        self._host: list[Tensor] = []
        indices: dict[int, int] = {}
        for module in [module for part in encoder.modules for module in part.modules()]:
            for name, tensor in [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]:
                if id(tensor) not in indices:
                    indices[id(tensor)] = len(self._host)
                    self._host.append(_like(tensor, _host_copy(tensor, device)))
                self._slots.append((module, name, indices[id(tensor)]))
        self._place(self._host)

    def __call__(self, captions: Sequence[str]) -> Condition:
        self._place([_like(tensor, tensor.to(self._device, non_blocking=True)) for tensor in self._host])
        try:
            return self._encoder(captions)
        finally:
            self._place(self._host)

    def _place(self, tensors: Sequence[Tensor]) -> None:
        for module, name, index in self._slots:
            setattr(module, name, tensors[index])


def _host_copy(tensor: Tensor, device: torch.device) -> Tensor:
    if device.type != "cuda":
        return tensor.detach()
    return pinned(tensor.nbytes, device).view(tensor.dtype).view(tensor.shape).copy_(tensor.detach())


def _like(tensor: Tensor, data: Tensor) -> Tensor:
    return nn.Parameter(data, requires_grad=False) if isinstance(tensor, nn.Parameter) else data


def load_part(folder: ModelFolder, name: str, *, dtype: torch.dtype | None) -> Any:
    """Load a part of a pipeline that is a class of transformers; models are frozen and read from safetensors only."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    directory, (library, class_name) = folder.part(name), folder.classes[name]
    part_class = getattr(transformers, class_name, None) if library == "transformers" else None
    if part_class is None:
        raise UserError(
            f"model.path: {name} is {library}.{class_name}, which transformers {transformers.__version__} lacks"
        )
    try:
        if dtype is None:
            return part_class.from_pretrained(directory)
        return part_class.from_pretrained(directory, dtype=dtype, use_safetensors=True).requires_grad_(False).eval()
    except (OSError, ValueError) as error:
        raise UserError(f"model.path: {directory} cannot be loaded as {class_name}: {error}") from error


def _plain(caption: str) -> str:
    """Undo HTML escapes and fold white space, as the pipelines do."""
    return re.sub(r"\s+", " ", html.unescape(html.unescape(caption))).strip()


def _tokens(tokenizer: Any, captions: Sequence[str], *, length: int) -> tuple[Tensor, Tensor]:
    """Ids and mask, int64 [B, length]."""
    encoded = tokenizer(list(captions), padding="max_length", max_length=length, truncation=True, return_tensors="pt")
    return encoded.input_ids, encoded.attention_mask


class _OneEncoder(CaptionEncoder):
    """A tokenizer and a language model, for captions of `length` tokens."""

    def __init__(self, tokenizer: Any, encoder: Any, *, length: int) -> None:
        self._tokenizer, self._encoder, self._length = tokenizer, encoder, length
        self.modules = (encoder,)


class _T5(_OneEncoder):
    @torch.no_grad()
    def __call__(self, captions: Sequence[str]) -> Condition:
        ids, mask = _tokens(self._tokenizer, [_plain(caption) for caption in captions], length=self._length)
        ids, mask = ids.to(self._encoder.device), mask.to(self._encoder.device)
        hidden = self._encoder(ids, mask).last_hidden_state
        return Condition(text=hidden * mask[..., None].to(hidden.dtype), text_mask=mask.bool())


class _Qwen(_OneEncoder):
    @torch.no_grad()
    def __call__(self, captions: Sequence[str]) -> Condition:
        """[B, length, layers x hidden]: each layer's states normalised to mean 0 and deviation 1 by token."""
        ids = torch.stack([self._chat(caption) for caption in captions]).to(self._encoder.device)
        layers = self._encoder(ids, output_hidden_states=True).hidden_states[1:]
        text = torch.cat([_normal(states) for states in layers], dim=-1)
        return Condition(text=text, text_mask=torch.ones_like(ids, dtype=torch.bool))

    def _chat(self, caption: str) -> Tensor:
        turns = [("system", _SYSTEM), ("user", caption)]
        messages = [{"role": role, "content": [{"type": "text", "text": text}]} for role, text in turns]
        ids = self._tokenizer.apply_chat_template(
            messages,
            tokenize=True,
            add_generation_prompt=False,
            add_vision_id=False,
            max_length=self._length,
            truncation=True,
            padding="max_length",
            return_dict=True,
        )["input_ids"]
        return torch.tensor(ids)


def _normal(states: Tensor) -> Tensor:
    return (states - states.mean(dim=-1, keepdim=True)) / (states.std(dim=-1, keepdim=True) + 1e-8)


class _StableDiffusion3(CaptionEncoder):
    def __init__(self, *, clips: Sequence[tuple[Any, Any]], t5: tuple[Any, Any], length: int) -> None:
        self._clips, self._t5, self._length = clips, t5, length
        self.modules = tuple(encoder for _, encoder in (*clips, t5))

    @torch.no_grad()
    def __call__(self, captions: Sequence[str]) -> Condition:
        tokenizer, encoder = self._t5
        ids, _ = _tokens(tokenizer, captions, length=self._length)
        long = encoder(ids.to(encoder.device))[0]
        short, pooled = zip(*(self._clip(*clip, captions) for clip in self._clips))
        beside = torch.cat(short, dim=-1).to(long.dtype)
        text = torch.cat([F.pad(beside, (0, long.shape[-1] - beside.shape[-1])), long], dim=1)
        mask = torch.ones(text.shape[:2], dtype=torch.bool, device=text.device)  # its attention masks nothing
        return Condition(text=text, text_mask=mask, pooled=torch.cat(pooled, dim=-1))

    def _clip(self, tokenizer: Any, encoder: Any, captions: Sequence[str]) -> tuple[Tensor, Tensor]:
        ids, _ = _tokens(tokenizer, captions, length=self._clips[0][0].model_max_length)
        out = encoder(ids.to(encoder.device), output_hidden_states=True)
        return out.hidden_states[-2], out[0]


class _Gemma(_OneEncoder):
    def __init__(self, tokenizer: Any, encoder: Any, *, length: int, instruction: str, bare: Collection[str]) -> None:
        """bare: captions without the instruction."""
        super().__init__(tokenizer, encoder, length=length)
        self._instruction, self._bare = instruction, bare
        tokenizer.padding_side = "right"

    @torch.no_grad()
    def __call__(self, captions: Sequence[str]) -> Condition:
        """Embed captions after the instruction; only the first of its states is kept, the start of the sequence."""
        rows = [self._embed(caption) for caption in captions]
        return Condition(text=torch.cat([text for text, _ in rows]), text_mask=torch.cat([mask for _, mask in rows]))

    def _embed(self, caption: str) -> tuple[Tensor, Tensor]:
        bare = caption in self._bare
        caption = caption.lower().strip()
        length = self._length
        if caption and self._instruction and not bare:
            length += len(self._tokenizer.encode(self._instruction)) - 2
            caption = self._instruction + caption
        ids, mask = (tensor.to(self._encoder.device) for tensor in _tokens(self._tokenizer, [caption], length=length))
        hidden = self._encoder(ids, attention_mask=mask)[0]
        kept = [0, *range(length - self._length + 1, length)]
        return hidden[:, kept], mask[:, kept].bool()


class ImageEncoder:
    """A pipeline's image encoder (CLIP vision, Wan2.1 image to video)."""

    def __init__(self, folder: ModelFolder, *, dtype: torch.dtype, device: torch.device) -> None:
        self._device, self._dtype = device, dtype
        self._encoder = load_part(folder, "image_encoder", dtype=dtype).to(device)
        self._processor = load_part(folder, "image_processor", dtype=None)
        self.modules = (self._encoder,)

    @torch.no_grad()
    def __call__(self, images: Tensor) -> Tensor:
        """uint8 [B, H, W, 3] -> [B, N, I]: hidden states before the last layer."""
        pixels = self._processor(images=list(images.cpu().numpy()), return_tensors="pt").pixel_values
        return self._encoder(pixels.to(self._device, self._dtype), output_hidden_states=True).hidden_states[-2]


class CachedCaptions(CaptionEncoder):
    """Embeds only the empty caption, as zeros; all others come from `pad_text`."""

    def __init__(self, *, width: int, length: int, pooled_width: int | None = None) -> None:
        self._width, self._length, self._pooled_width = width, length, pooled_width

    def __call__(self, captions: Sequence[str]) -> Condition:
        """Raises UserError for a caption that is not empty."""
        if unknown := [caption for caption in captions if caption]:
            raise UserError(
                f'the caption {unknown[0][:60]!r} has no embedding in the data and text.encoder = "cached" makes none; '
                'embed all captions beforehand, or set text.encoder = "model"'
            )
        text = torch.zeros(len(captions), self._length, self._width)
        pooled = None if self._pooled_width is None else torch.zeros(len(captions), self._pooled_width)
        return Condition(text=text, text_mask=torch.zeros(text.shape[:2], dtype=torch.bool), pooled=pooled)


def pad_text(embeddings: Sequence[Tensor], *, length: int, width: int, where: Sequence[str] = ()) -> Condition:
    """Embeddings [l, E] of captions -> Condition with text [B, length, E], cut or padded by zeros.

    `where` names the embeddings for messages. Raises UserError for one of another shape.
    """
    text = torch.zeros(len(embeddings), length, width)
    mask = torch.zeros(len(embeddings), length, dtype=torch.bool)
    for row, embedding in enumerate(embeddings):
        if embedding.ndim != 2 or embedding.shape[1] != width:
            name = where[row] if where else f"embedding {row}"
            raise UserError(
                f"{name} is {list(embedding.shape)}; the network takes [tokens, {width}]: embed the captions with the "
                "text encoder that it was trained with"
            )
        kept = embedding[:length]
        text[row, : len(kept)] = kept
        mask[row, : len(kept)] = True
    return Condition(text=text, text_mask=mask)


_WORD = re.compile(r"[^\W_]+|[^\w\s]")


class WordEncoder(CaptionEncoder):
    """Maps a word to a Gaussian vector seeded by the word and the seed, without a vocabulary.

    The pooled vector of a caption is seeded by the whole caption in the same way.
    """

    def __init__(self, *, width: int, length: int, seed: int = 0, pooled_width: int | None = None) -> None:
        """`length`: most words of a caption; further words are dropped."""
        self._width, self._length, self._seed, self._pooled_width = width, length, seed, pooled_width

    def __call__(self, captions: Sequence[str]) -> Condition:
        """Return text [B, L, E] and mask; "" has no token."""
        text = torch.zeros(len(captions), self._length, self._width)
        mask = torch.zeros(len(captions), self._length, dtype=torch.bool)
        for row, caption in enumerate(captions):
            for place, word in enumerate(_WORD.findall(caption.lower())[: self._length]):
                text[row, place] = self._vector(word, self._width)
                mask[row, place] = True
        pooled = None
        if self._pooled_width is not None:
            pooled = torch.stack([self._vector(f"caption:{caption}", self._pooled_width) for caption in captions])
        return Condition(text=text, text_mask=mask, pooled=pooled)

    def _vector(self, word: str, width: int) -> Tensor:
        generator = torch.Generator().manual_seed(self._seed * 2**32 + zlib.crc32(word.encode()))
        return torch.randn(width, generator=generator)

"""Tokenises an instruction (and, for pi0.5, the state). No torch here.

words   reach the red square                                          tiny models
pi0     <bos>pick up the bowl\\n
pi05    <bos>Task: pick up the bowl, State: 127 90 ... 255;\\nAction:    the state in 256 bins of [-1, 1]
openvla <s>In: What action should the robot take to pick up the bowl?\\nOut:    and an empty word
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np

from cosmos_rl_core.errors import UserError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

Format = Literal["words", "pi0", "pi05", "openvla"]
FILE = "tokenizer.json"
_PAD, _UNKNOWN, _BOS = "<pad>", "<unk>", "<bos>"
_LLAMA_BOS, _LLAMA_SPACE = "<s>", "\u2581"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """Instructions of B samples."""

    tokens: np.ndarray
    """[B, L] int64, padded with zeros."""
    mask: np.ndarray
    """[B, L] bool: False for padding."""


class Instructions:
    """Formats and tokenises prompts: `instructions(["close the faucet"], states)`."""

    def __init__(self, tokenizer: Tokenizer, *, format: Format, max_length: int) -> None:
        self._tokenizer = tokenizer
        self.format: Format = format
        self.max_length = max_length
        # in training, Llama's tokenizer made a token of the space between "Out:" and the action tokens
        self._after = (tokenizer.token_to_id(_LLAMA_SPACE),) if format == "openvla" else ()

    @property
    def vocab_size(self) -> int:
        """Number of tokens in the vocabulary."""
        return self._tokenizer.get_vocab_size()

    def __call__(self, instructions: Sequence[str], states: np.ndarray) -> Tokens:
        """Return the tokens of B instructions at normalised states [B, n], padded to the longest.

        Raises ValueError for a prompt that is longer than `max_length`.
        """
        prompts = [self.prompt(text, state) for text, state in zip(instructions, states, strict=True)]
        rows = [
            [*encoding.ids, *self._after]
            for encoding in self._tokenizer.encode_batch(prompts, add_special_tokens=False)
        ]
        longest = max(len(row) for row in rows)
        if longest > self.max_length:
            raise ValueError(
                f"an instruction of {longest} tokens, the maximum is {self.max_length}: "
                f"{prompts[[len(row) for row in rows].index(longest)]!r}"
            )
        tokens = np.zeros((len(rows), longest), dtype=np.int64)
        for row, ids in zip(tokens, rows, strict=True):
            row[: len(ids)] = ids
        return Tokens(tokens=tokens, mask=np.arange(longest) < np.array([[len(row)] for row in rows]))

    def prompt(self, instruction: str, state: np.ndarray) -> str:
        """Return the text to tokenise; only "pi05" uses `state` [n]."""
        clean = " ".join(instruction.replace("_", " ").split())
        if self.format == "words":
            return f"{_BOS}{clean}"
        if self.format == "pi0":
            return f"{_BOS}{clean}\n"
        if self.format == "openvla":
            return f"{_LLAMA_BOS}In: What action should the robot take to {clean.lower()}?\nOut:"
        bins = " ".join(str(place) for place in state_bins(state))
        return f"{_BOS}Task: {clean}, State: {bins};\nAction: "

    def save(self, directory: Path) -> None:
        """Write `tokenizer.json`, which transformers' PreTrainedTokenizerFast reads too."""
        self._tokenizer.save(str(directory / FILE))

    @classmethod
    def load(cls, path: Path, *, format: Format, max_length: int) -> Instructions:
        """Read a `tokenizer.json`, from the file or its directory. Raises UserError."""
        from tokenizers import Tokenizer

        path = path / FILE if path.is_dir() else path
        owner = "Llama 2" if format == "openvla" else "PaliGemma"
        if not path.is_file():
            raise UserError(
                f"{path} does not exist: many models are published without their tokenizer.json, which is {owner}'s; "
                "save it beside the model (AutoTokenizer.from_pretrained(...).save_pretrained(...))"
            )
        tokenizer = Tokenizer.from_file(str(path))
        needed = (_LLAMA_BOS, _LLAMA_SPACE) if format == "openvla" else (_BOS,)
        for name in needed:
            if tokenizer.token_to_id(name) is None:
                raise UserError(f"{path} has no token {name}, which every prompt has: use {owner}'s tokenizer")
        tokenizer.no_padding()
        tokenizer.no_truncation()
        return cls(tokenizer, format=format, max_length=max_length)


def word_instructions(texts: Iterable[str], *, max_length: int = 16) -> Instructions:
    """Return a tokenizer of the words of `texts`, in alphabetical order; other words become the unknown token."""
    from tokenizers import AddedToken, Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.normalizers import Lowercase
    from tokenizers.pre_tokenizers import Whitespace

    words = sorted(
        {word for text in texts for word, _ in Whitespace().pre_tokenize_str(text.lower().replace("_", " "))}
    )
    vocabulary = {word: place for place, word in enumerate((_PAD, _UNKNOWN, _BOS, *words))}
    tokenizer = Tokenizer(WordLevel(vocab=vocabulary, unk_token=_UNKNOWN))
    tokenizer.normalizer = Lowercase()
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.add_special_tokens([AddedToken(name, normalized=False) for name in (_PAD, _UNKNOWN, _BOS)])
    return Instructions(tokenizer, format="words", max_length=max_length)


def state_bins(state: np.ndarray) -> np.ndarray:
    """Return the bin, 0 .. 255, of each number in [-1, 1]; -1 below the range (openpi, lerobot)."""
    return np.digitize(state, np.linspace(-1, 1, 257)[:-1]) - 1

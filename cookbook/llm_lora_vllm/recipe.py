"""Warm up all weights of a tiny model by SFT; then train adapters alone by GRPO, with vLLM as the engine.

python cookbook/llm_lora_vllm/recipe.py [--dir runs/llm_lora_vllm] [section.key=value ...]
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from cosmos_rl_core import run
from cosmos_rl_llm import write_sums, write_tiny_model

HERE = Path(__file__).parent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, default=Path("runs/llm_lora_vllm"))
    parser.add_argument("--warm-up-steps", type=int, default=None, help="steps of SFT; by default those of sft.toml")
    parser.add_argument("--seed", type=int, default=0, help="of both runs")
    parser.add_argument("overrides", nargs="*", help="section.key=value for the GRPO run")
    arguments = parser.parse_args()
    directory: Path = arguments.dir

    print("1/3  a tiny Qwen3, a tokenizer of 15 characters, and problems such as 47+38=")
    train, test = write_sums(directory / "data")
    base = write_tiny_model(directory / "base")

    print("2/3  a supervised warm-up of all weights: the base model of the adapters")
    overrides = [f"run.output_dir={directory / 'sft'}", f"model.path={base}", f"data.path={train}"]
    overrides += [f"run.seed={arguments.seed}"]
    overrides += [f"run.max_steps={arguments.warm_up_steps}"] if arguments.warm_up_steps else []
    warm = run(HERE / "sft.toml", overrides, overwrite=True)
    if warm.interrupted:  # by Ctrl-C or SIGTERM, which ends one run
        raise SystemExit(130)

    print("3/3  GRPO of adapters: vLLM gets A and B for each version")
    assert warm.checkpoint is not None
    overrides = [f"run.output_dir={directory / 'grpo'}", f"model.path={warm.checkpoint / 'policy'}"]
    overrides += [f"data.path={train}", f"eval.data.path={test}", f"run.seed={arguments.seed}", *arguments.overrides]
    done = run(HERE / "run.toml", overrides, overwrite=True)

    if done.interrupted:
        raise SystemExit(130)
    assert done.checkpoint is not None
    evaluated = [json.loads(line) for line in (directory / "grpo/eval.jsonl").read_text().splitlines()]
    adapters = (done.checkpoint / "policy/adapter_model.safetensors").stat().st_size
    model = (warm.checkpoint / "policy/model.safetensors").stat().st_size
    print(f"\naccuracy on held-out sums: {' -> '.join(format(line['eval/reward_mean'], '.3f') for line in evaluated)}")
    print(f"largest mismatch_kl of a step: {max(line['mismatch_kl'] for line in done.metrics):.1e}")
    print(f"bytes of a sync: {done.metrics[-1]['sync_bytes']:,.0f}; files: adapters {adapters:,}, model {model:,}")


if __name__ == "__main__":
    main()

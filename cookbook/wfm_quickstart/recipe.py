"""Make clips and a judge, pretrain a tiny video model, then train it with rewards: FlowGRPO, DDRL and DiffusionNFT.

python cookbook/wfm_quickstart/recipe.py [--dir runs/wfm_quickstart]
"""

from __future__ import annotations

import argparse
import json
import sys
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from subprocess import PIPE, Popen

import judge as judges
from arms import ARMS, Arm, Result, base_of, result_of
from clips import CAPTIONS, make_clips, read_clips
from report import write_report
from safetensors.torch import save_file

from cosmos_rl_core import run

HERE = Path(__file__).parent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, default=Path("runs/wfm_quickstart"))
    parser.add_argument("--clips", type=int, default=2000)
    parser.add_argument("--pretrain-steps", type=int, default=1500)
    parser.add_argument("--rl-steps", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0, help="of clips, judge and runs")
    arguments = parser.parse_args()
    directory: Path = arguments.dir.resolve()

    print("1/4  clips of shapes that move, as mp4 files with captions; and a judge that is never a reward")
    data = directory / "data"
    make_clips(data, count=arguments.clips, seed=2 * arguments.seed)
    make_clips(directory / "held_out_clips", count=120, seed=2 * arguments.seed + 1)
    train_judge(data, seed=arguments.seed)
    write_prompts(data / "prompts.jsonl", repeats=1)
    write_prompts(data / "held_out.jsonl", repeats=10)

    print("2/4  a tiny Wan transformer learns to generate them")
    overrides = [f"run.output_dir={directory / 'base'}", f"data.path={data}"]
    overrides += [f"run.max_steps={arguments.pretrain_steps}", f"run.seed={arguments.seed}"]
    overrides += [f"policy.schedule.warmup_steps={min(50, arguments.pretrain_steps // 4)}"]
    base = run(HERE / "sft.toml", overrides, overwrite=True)
    if base.interrupted:  # by Ctrl-C or SIGTERM, which ends one run
        raise SystemExit(130)
    assert base.checkpoint is not None

    print("3/4  rewards from a service of their own; the model is rewarded in four ways")
    with reward_server(directory / "reward.token") as url:
        keys = [f"run.max_steps={arguments.rl_steps}", f"run.seed={arguments.seed}"]
        results = [train(arm, base.checkpoint / "policy", directory, url, keys=keys) for arm in ARMS]

    print("4/4  what came of it")
    print(write_report(directory, base_of(results), results))


def train_judge(data: Path, *, seed: int) -> None:
    videos, captions = read_clips(data)
    seen = len(videos) - int(judges.HELD_OUT * len(videos))
    judge = judges.train_judge(videos[:seen], captions[:seen], seed=seed)
    save_file(judge.state_dict(), data / "judge.safetensors")
    print(f"     the judge is right about {judges.prompt_ok(judge, videos[seen:], captions[seen:]):.3f} of real clips")


def write_prompts(path: Path, *, repeats: int) -> None:
    rows = [{"caption": caption} for _ in range(repeats) for caption in CAPTIONS]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


@contextmanager
def reward_server(token_file: Path) -> Iterator[str]:
    """A process that scores brightness and speed; yields its address."""
    command = [
        str(Path(sys.executable).with_name("cosmos-rl")),
        "reward-server",
        "--port",
        "0",
        "--token-file",
        str(token_file),
    ]
    with Popen([*command, "--reward", "wfm:brightness", "--reward", "wfm:speed"], stdout=PIPE, text=True) as server:
        assert server.stdout is not None
        line = server.stdout.readline()
        assert "http://" in line, "the reward server did not start; its reason is above"
        print(f"     {line.strip()}")
        try:
            yield line.split()[2]
        finally:
            server.terminate()


def train(arm: Arm, base: Path, directory: Path, url: str, *, keys: Sequence[str]) -> Result:
    """Train the base model with one reward and algorithm."""
    print(f"\n     {arm.title}")
    remote = {"reward": arm.reward, "url": url, "token_file": str(directory / "reward.token")}
    rewards = [
        {"name": "remote", "label": arm.reward, "weight": arm.weight, "options": remote},
        {"name": "judge:PromptOk", "weight": 0.0, "options": {"path": str(directory / "data" / "judge.safetensors")}},
    ]
    overrides = [
        f"run.output_dir={directory / arm.name}",
        *keys,
        f"model.path={base}",
        f"data.path={directory / 'data' / 'prompts.jsonl'}",
        f"eval.data.path={directory / 'data' / 'held_out.jsonl'}",
        f"eval.loss_data.path={directory / 'held_out_clips'}",
        *(override.replace("CLIPS", str(directory / "data")) for override in arm.overrides),
    ]
    recipe = tomllib.loads((HERE / "rl.toml").read_text(encoding="utf-8"))
    recipe["reward"]["functions"] = rewards
    result = run(recipe, overrides, overwrite=True, python_path=[str(HERE)])
    if result.interrupted:  # by Ctrl-C or SIGTERM, which ends one run
        raise SystemExit(130)
    return result_of(arm, directory)


if __name__ == "__main__":
    main()

"""GRPO of a vision-language model with two policy replicas, each of which has a part of the batch."""

import json

import pytest

from cosmos_rl_core import run

pytest.importorskip("PIL")
pytest.importorskip("cosmos_rl_transfer", reason="weights are sent between processes")

from tiny_vision import COLOURS, make, square, write_processing

STEPS = 3


@pytest.mark.ci
def test_two_policy_replicas_train_on_pictures_and_name_those_of_the_whole_batch(tmp_path):
    make("qwen3_vl").save_pretrained(tmp_path / "base")
    write_processing(tmp_path / "base")
    (tmp_path / "letters.py").write_text(
        "def letters(group):\n    return [float(len(r.text)) for r in group.rollouts]\n"
    )
    rows = []
    for number, (name, colour) in enumerate([*COLOURS.items()] * 4):
        square(colour, dark_rows=number + 1).save(tmp_path / f"{number}.png")
        rows.append({"prompt": "what colour ?", "picture": f"{number}.png", "answer": name, "number": number})
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    result = run({
        "run": {"domain": "llm", "max_steps": STEPS, "output_dir": str(tmp_path / "run"), "share_gpus": True},
        "model": {"path": str(tmp_path / "base")},
        "data": {
            "path": str(tmp_path / "rows.jsonl"),
            "image_column": "picture",
            "answer_column": "answer",
            "media": {"root": str(tmp_path)},
        },
        "prompts": {"shuffle": False},
        "algorithm": {"name": "grpo"},
        "policy": {"replicas": 2, "prompts_per_step": 4, "optimizer": {"learning_rate": 1e-3}},
        "rollout": {"group_size": 2, "sampling": {"max_tokens": 3}, "threads": 1},
        "reward": {"functions": [{"name": "letters:letters"}]},
    }, python_path=[str(tmp_path)])  # fmt: skip
    assert result.steps == STEPS
    assert all(line["members"] == 3 and line["grad_norm"] > 0 for line in result.metrics)
    for step in range(STEPS):
        lines = [
            json.loads(line) for line in (tmp_path / f"run/rollouts/step_{step:06d}.jsonl").read_text().splitlines()
        ]
        assert len(lines) == 4 * 2
        shown = {line["sample"]: line["prompt_media"] for line in lines if "prompt" in line}
        assert shown == {sample: {"image": f"{sample % len(rows)}.png"} for sample in shown}
        assert len(shown) == 4

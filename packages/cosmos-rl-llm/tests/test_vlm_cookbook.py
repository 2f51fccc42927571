"""The recipe of Cosmos-Reason but for the sizes: public file layouts, supervised, then GRPO, on a CPU."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import save_file

from cosmos_rl_core import run
from cosmos_rl_core.observe.gallery import write_video

pytest.importorskip("av")
pytest.importorskip("PIL")

from tiny_vision import make, write_processing

RECIPE = Path(__file__).parents[3] / "cookbook/vlm_cosmos_reason"
pytestmark = pytest.mark.skipif(not RECIPE.is_dir(), reason="the wheel comes without the cookbook")


def write_checkpoint(directory, name):
    """A tiny model under the names of the hub's checkpoints, in two files with an index."""
    directory.mkdir()
    module = make(name)
    module.config.architectures = [type(module).__name__]
    module.config.save_pretrained(directory)
    module.generation_config.save_pretrained(directory)
    write_processing(directory, name)
    tensors = {}
    for key, value in module.state_dict().items():
        if name == "qwen2_5_vl":  # published before transformers put both parts under `model`
            key = key.replace("model.visual.", "visual.").replace("model.language_model.", "model.")
        tensors[key] = value.clone()
    names = sorted(tensors)
    parts = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, keys in parts.items():
        save_file({key: tensors[key] for key in keys}, directory / file, metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": {key: file for file, keys in parts.items() for key in keys}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return directory


def write_dataset(folder, rows):
    """The folder of a dataset, its archive of clips unpacked."""
    (folder / "clips").mkdir(parents=True)
    for number in range(len(rows)):
        write_video(folder / "clips" / f"{number}.mp4", np.full((24, 24, 32, 3), 60 * number, np.uint8), fps=8.0)
    (folder / "clips.tar.gz").touch()
    (folder / f"{folder.name}.json").write_text(json.dumps(rows))
    return folder


def prepare(*arguments):
    command = [sys.executable, str(RECIPE / "prepare.py"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True)


def tiny(folder, rows, model, output):
    """Overrides that bring a recipe down to one process and a second a step."""
    return [
        f"run.output_dir={output}",
        "run.placement=inline",
        "run.max_steps=2",
        f"model.path={model}",
        "model.dtype=float32",
        "model.max_length=200",
        f"data.path={rows}",
        f"data.media.root={folder}",
        "policy.prompts_per_step=2",
        "policy.microbatch_terms=400",
        "policy.schedule.warmup_steps=0",
        "policy.parallel={}",
        "checkpoint.every_steps=0",
    ]


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.ci
@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen3_vl"])
def test_cosmos_reason_learns_chats_about_videos_then_answers_questions(name, tmp_path):
    said = [{"role": "user", "content": "what colour ?"}, {"role": "assistant", "content": "red"}]
    asked = {"question": "what colour ?", "index2ans": {"A": "red", "B": "blue"}, "answer": "A"}
    chats = [{"video": f"elsewhere/{number}.mp4", "conversations": said} for number in range(4)]
    questions = [{"video": f"clips/{number}.mp4", "qa_pairs": asked} for number in range(4)]
    chats, questions = write_dataset(tmp_path / "chats", chats), write_dataset(tmp_path / "questions", questions)
    model = write_checkpoint(tmp_path / "model", name)
    rows = tmp_path / "sft.jsonl", tmp_path / "held_out.jsonl", tmp_path / "rl.jsonl"
    assert "3 rows" in prepare(chats, rows[0], "--held-out", 1, rows[1]).stdout
    assert "4 rows" in prepare(questions, rows[2]).stdout

    evaluated = [f"eval.data.path={rows[1]}", f"eval.data.media.root={chats}"]
    taught = run(RECIPE / "sft.toml", [*tiny(chats, rows[0], model, tmp_path / "sft"), *evaluated])
    assert all(line["loss"] > 0 for line in taught.metrics)
    assert len(read(tmp_path / "sft/eval.jsonl")) == 2

    small = [
        "rollout.engine=torch",
        "rollout.replicas=1",
        "rollout.group_size=4",
        "rollout.sampling.max_tokens=6",
        "sync.dtype=float32",
    ]
    overrides = tiny(questions, rows[2], taught.checkpoint / "policy", tmp_path / "rl")
    answered = run(RECIPE / "rl.toml", [*overrides, *small, "rollout.engine=torch"])
    assert [line["step"] for line in answered.metrics] == [0, 1]
    assert {"reward/multiple_choice", "reward/format"} <= answered.metrics[0].keys()
    shown = read(next(iter(sorted((tmp_path / "rl/rollouts").glob("*.jsonl")))))[0]["prompt"]
    assert shown.count("<|video_pad|>") > 1
    assert ("seconds" in shown) == (name == "qwen3_vl")


def test_a_row_without_its_clip_is_named(tmp_path):
    (tmp_path / "a.json").write_text(json.dumps([{"video": "clips/7.mp4", "conversations": []}]))
    done = prepare(tmp_path, tmp_path / "out.jsonl")
    assert done.returncode == 1
    assert "a.json[0]: no clip '7.mp4'" in done.stderr


def test_a_row_of_another_form_is_named(tmp_path):
    (tmp_path / "7.mp4").touch()
    (tmp_path / "a.jsonl").write_text(json.dumps({"video": "7.mp4", "caption": "a robot"}) + "\n")
    done = prepare(tmp_path, tmp_path / "out.jsonl")
    assert done.returncode == 1
    assert "a.jsonl[0]: neither a chat" in done.stderr

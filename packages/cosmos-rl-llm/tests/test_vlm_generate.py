"""`cosmos-rl generate` with files beside a prompt, and `eval` on rows with pictures, in real processes."""

import json
import sys

import numpy as np
import pytest
import torch

pytest.importorskip("PIL")
pytest.importorskip("av")

from tiny_vision import COLOURS, WORDS, make, square, write_processing

from cosmos_rl_core.cli.app import main
from cosmos_rl_core.errors import UserError
from cosmos_rl_core.inference.evaluate import evaluate
from cosmos_rl_core.inference.generate import generate
from cosmos_rl_core.inference.request import Request
from cosmos_rl_core.observe.gallery import write_video

REWARD = '''
def brightness(group):
    """Mean of the picture, which tells bright rows from dark ones."""
    return [float(rollout.media["image"].mean()) / 255 for rollout in group.rollouts]
'''


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model, pictures, held-out rows, a reward, and a recipe of all."""
    folder = tmp_path_factory.mktemp("seen")
    model = make("qwen3_vl")
    with torch.no_grad():  # it says colours alone
        weights = model.get_output_embeddings().weight
        red, green = (weights[WORDS.index(name)].clone() for name in ("red", "green"))
        weights.zero_()
        weights[WORDS.index("red")], weights[WORDS.index("green")] = red - green, green - red
    model.save_pretrained(folder / "model")
    write_processing(folder / "model")
    (folder / "pictures").mkdir()
    rows = []
    for name, colour in COLOURS.items():
        square(colour, dark_rows=0).save(folder / "pictures" / f"{name}.png")
        rows.append({"prompt": "what colour ?", "picture": f"{name}.png", "answer": name})
    rows.append({"prompt": "what colour ?", "picture": "gone.png", "answer": "red"})
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    write_video(folder / "clip.mp4", np.full((8, 24, 32, 3), 90, np.uint8), fps=4.0)
    (folder / "bright.py").write_text(REWARD)
    recipe = f"""
[run]
domain = "llm"
placement = "inline"
max_steps = 1
output_dir = "{folder}/run"

[model]
path = "{folder}/model"

[data]
path = "{folder}/rows.jsonl"
image_column = "picture"
answer_column = "answer"

[data.media]
root = "{folder}/of_training"

[eval.data]
path = "{folder}/rows.jsonl"
image_column = "picture"
answer_column = "answer"
media = {{ root = "{folder}/pictures" }}

[rollout]
threads = 1

[rollout.sampling]
max_tokens = 4

[[reward.functions]]
name = "bright:brightness"
"""
    (folder / "run.toml").write_text(recipe)
    return folder


@pytest.fixture(autouse=True)
def _path(monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))


def lines_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.ci
def test_generate_answers_a_question_about_files(folder, tmp_path, capsys):
    files = ["--image", folder / "pictures/red.png", "--image", folder / "pictures/blue.png"]
    files += ["--video", folder / "clip.mp4"]
    given = [folder / "run.toml", "--prompts", "what colour ?", *files, "--out", tmp_path]
    with pytest.raises(SystemExit) as ended:
        main(["generate", *map(str, given)])
    assert ended.value.code == 0
    (line,) = lines_of(tmp_path / "rollouts.jsonl")
    assert line["prompt_media"] == {
        "image": str(folder / "pictures/red.png"),
        "image_1": str(folder / "pictures/blue.png"),
        "video": str(folder / "clip.mp4"),
    }
    assert line["prompt"].count("<|image_pad|>") == 2 * 4
    assert line["prompt"].count("<|video_pad|>") > 1
    assert set(line["response"].split()) <= {"red", "green"}
    assert capsys.readouterr().out.splitlines()[0] == line["response"] != ""


@pytest.mark.ci
def test_eval_measures_rewards_of_rows_with_pictures(folder, tmp_path):
    """They are read with the settings of [eval.data], not with those of [data]."""
    request = Request(out=tmp_path, num_samples=2)
    overrides = ["eval.temperature=1.0"]
    measured = evaluate(folder / "run.toml", overrides, request=request, python_path=[str(folder)])
    wanted = [float(np.mean(colour)) / 255 for colour in COLOURS.values()]
    assert measured.rows == 3
    assert measured.metrics["reward"].mean == pytest.approx(np.mean(wanted), abs=1e-6)
    assert set(measured.failed) == {3}
    assert "gone.png: No such file" in measured.failed[3]
    lines = [line for line in lines_of(tmp_path / "rollouts.jsonl") if "rollout" in line]
    shown = [(line["prompt_media"]["image"], line["reward"]) for line in lines]
    assert shown == [(f"{name}.png", pytest.approx(value)) for name, value in zip(COLOURS, wanted) for _ in range(2)]


@pytest.mark.parametrize(
    ("request_of", "overrides", "reason"),
    [
        (lambda folder: {"prompts": "what ?", "images": (folder / "gone.png",)}, [], r"--image .*gone.png: No such"),
        (lambda folder: {"images": (folder / "pictures/red.png",)}, [], "belong to one prompt, --prompts TEXT"),
        (
            lambda folder: {"prompts": str(folder / "rows.jsonl"), "images": (folder / "pictures/red.png",)},
            [],
            "rows of a list name their files",
        ),
        (
            lambda folder: {"prompts": "what ?", "videos": (folder / "clip.mp4",)},
            ["data.media.max_bytes=100"],
            r"--video .*clip.mp4: [\d,]+ bytes, more than data.media.max_bytes",
        ),
    ],
    ids=["missing", "no prompt", "a list", "too large"],
)
def test_files_that_cannot_be_attached_are_refused(folder, tmp_path, request_of, overrides, reason):
    request = Request(out=tmp_path, **request_of(folder))
    with pytest.raises(UserError, match=reason):
        generate(folder / "run.toml", overrides, request=request)

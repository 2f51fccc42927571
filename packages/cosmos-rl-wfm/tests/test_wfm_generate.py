"""`cosmos-rl generate` and `eval` of videos: a model of pixels, mock prompts, one process and two."""

import json

import av
import numpy as np
import pytest
from PIL import Image
from wfm_fixtures import mock_data, pixel_model, shown

from cosmos_rl_core.checkpoint.manifest import Origin, TrainState
from cosmos_rl_core.checkpoint.resume import recipe_of
from cosmos_rl_core.checkpoint.saver import CheckpointSaver
from cosmos_rl_core.errors import UserError
from cosmos_rl_core.inference.evaluate import evaluate
from cosmos_rl_core.inference.generate import generate
from cosmos_rl_core.inference.prompts import read_prompts
from cosmos_rl_core.inference.request import Instances, Request
from cosmos_rl_core.observe.gallery import Gallery
from cosmos_rl_core.parallel.rank_group import RankGroup
from cosmos_rl_core.parallel.setup import ModelSetup
from cosmos_rl_core.recipe.load import load_config, load_domain
from cosmos_rl_core.recipe.sections import CheckpointSection
from cosmos_rl_core.storage.folder import Folder
from cosmos_rl_core.train.trainer import Trainer

pytestmark = [pytest.mark.ci, pytest.mark.xdist_group("wfm_generate")]  # one process makes what they share

RECIPE = {
    "run": {"domain": "wfm", "max_steps": 1},
    "model": pixel_model().model_dump(mode="json"),
    "data": mock_data().model_dump(mode="json", exclude_none=True),
    "algorithm": {"name": "nft"},
    "rollout": {"threads": 1, "sampling": {"rule": "ode", "num_steps": 2, "eval_num_steps": 3, "old_decay": "slow"}},
    "reward": {"functions": [{"name": "brightness"}, {"name": "motion", "weight": 0.5}]},
    "eval": {"data": mock_data(mock={"rows": 5}).model_dump(mode="json", exclude_none=True)},
}


@pytest.fixture(scope="module")
def config():
    return load_config(RECIPE)


@pytest.fixture(scope="module")
def checkpoint(config, tmp_path_factory):
    """Weights that are not those of the recipe's model, with the old ones of DiffusionNFT beside them."""
    import torch

    policy = load_domain("wfm").build_policy(
        config.model, data=config.data, sampling=config.rollout.sampling.build(), seed=0, setup=ModelSetup()
    )
    with torch.no_grad():
        for parameter in policy.module.parameters():
            parameter.add_(0.05)
    assert any(name.startswith("old:") for name in policy.weights())
    optimizer = torch.optim.SGD(policy.module.parameters(), lr=1.0)
    root = tmp_path_factory.mktemp("checkpoint")
    CheckpointSaver(
        CheckpointSection(),
        root=Folder.at(root),
        trainer=Trainer(policy, objective=None, optimizer=optimizer, lr_factor=lambda step: 1.0, max_grad_norm=1.0),
        state=TrainState(step=0),
        ranks=RankGroup(),
        origin=Origin(recipe=recipe_of(config)),
    ).finish()
    return str(root)


def content(folder):
    """rollouts.jsonl and every file of media/, byte by byte."""
    files = sorted((folder / "media").iterdir())
    return (folder / "rollouts.jsonl").read_text(), {path.name: path.read_bytes() for path in files}


def frames_of(path):
    with av.open(str(path)) as container:
        return np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])


@pytest.fixture(scope="module")
def base(config, tmp_path_factory):
    """The recipe's own model, evaluated in one process."""
    out = tmp_path_factory.mktemp("base")
    return evaluate(config, request=Request(out=out, num_samples=2))


@pytest.mark.slow
def test_one_and_two_processes_make_the_same_films(config, base, tmp_path):
    two = evaluate(config, request=Request(out=tmp_path, num_samples=2, instances=Instances(num_gpus=2)))
    assert (two.rows, two.failed, two.metrics) == (5, {}, base.metrics)
    one = content(base.directory)
    assert one == content(tmp_path)
    assert len(one[1]) == len(set(one[1].values())) == 10
    line = json.loads(one[0].splitlines()[3])
    assert (line["sample"], line["rollout"], line["media"]) == (1, 1, ["media/000001_1.mp4"])
    assert line["prompt"] == "a green gradient moves right"
    assert frames_of(tmp_path / "media" / "000001_1.mp4").shape == (4, 8, 8, 3)


def test_the_weights_of_a_checkpoint_are_measured(config, base, checkpoint, tmp_path):
    trained = evaluate(config, request=Request(checkpoint=checkpoint, out=tmp_path, num_samples=2, media=False))
    assert not (tmp_path / "media").exists()
    assert trained.metrics.keys() == {"reward", "reward/brightness", "reward/motion"}
    assert trained.metrics["reward"].mean != pytest.approx(base.metrics["reward"].mean, abs=1e-4)
    bright, motion = (trained.metrics[f"reward/{name}"].mean for name in ("brightness", "motion"))
    assert trained.metrics["reward"].mean == pytest.approx(bright + 0.5 * motion)


def test_a_list_of_captions_with_one_that_is_none(config, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('"a red disc"\n{"caption": "a blue disc", "fps": 4}\n{"text": "no caption"}\n')
    made = generate(config, request=Request(prompts=str(prompts), out=tmp_path / "out"))
    assert [line.get("prompt") for line in made.lines] == ["a red disc", "a blue disc", None]
    assert "prompts.jsonl:3: no column 'caption'" in made.failed[2]
    with av.open(str(tmp_path / "out" / "media" / "000001_0.mp4")) as video:
        assert video.streams.video[0].average_rate == 4


def test_a_rollout_is_written_whole_and_an_image_as_one(tmp_path):
    pixels = np.random.default_rng(0).integers(256, size=(1, 200, 150, 3), dtype=np.uint8)
    path = Gallery(tmp_path).write(tmp_path / "000000_0", shown(pixels, caption="a square"), 0)
    assert path == tmp_path / "000000_0.png"
    assert np.array_equal(np.asarray(Image.open(path)), pixels[0])


def test_paths_of_a_prompt_are_relative_to_its_list(config, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"caption": "a disc", "video": "clips/1.mp4"}\n')
    (row,) = read_prompts(config, load_domain("wfm"), str(prompts)).rows
    assert row.columns["video"] == str(tmp_path / "clips" / "1.mp4")


def test_a_caption_is_a_prompt(config):
    (row,) = read_prompts(config, load_domain("wfm"), "  a red cube ").rows
    assert row.columns["caption"] == "a red cube"
    with pytest.raises(UserError, match="is empty"):
        read_prompts(config, load_domain("wfm"), " ")


def test_an_engine_of_one_gpu_is_not_spread(config, tmp_path):
    with pytest.raises(UserError, match="--tp-size 2: the engine 'torch' of the wfm domain runs on one GPU"):
        generate(config, request=Request(out=tmp_path, instances=Instances(num_gpus=2, tp_size=2)))

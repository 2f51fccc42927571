"""Checkpoints: whole or absent, told apart from damaged ones, and enough to go on bit for bit."""

import errno
import shutil

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from cosmos_rl_core.algorithms.config import AlgorithmConfig
from cosmos_rl_core.algorithms.objective import build_objective
from cosmos_rl_core.interfaces import UserError
from cosmos_rl_core.testing.tiny_model import TinyPolicy, collate_answers
from cosmos_rl_core.testing.tiny_task import TinyModel
from cosmos_rl_core.train import checkpoint
from cosmos_rl_core.train.manifest import MANIFEST, TrainState, list_steps, read_state, verify
from cosmos_rl_core.train.optim import build_optimizer
from cosmos_rl_core.train.trainer import Trainer

MODEL = TinyModel(actions=3, contexts=4, hidden=4)


def make(*, model=MODEL, name="adamw", version=0):
    policy = TinyPolicy(model, temperature=1.0)
    return Trainer(
        policy,
        objective=build_objective(AlgorithmConfig(name="sft"), max_terms=3),
        optimizer=build_optimizer(
            name, policy.module, learning_rate=0.05, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.1
        ),
        rate_factor=lambda step: 1.0 / (1 + step),
        max_grad_norm=1.0,
        version=version,
    )


def train(trainer, *, until):
    """Steps up to a version, each on rows drawn from torch's random state. Returns the losses."""
    losses = []
    while trainer.version < until:
        rows = [{"context": int(c)} for c in torch.randint(0, 4, (3,))]
        batch = collate_answers(rows, actions=3, length=3, microbatch_terms=6)
        trainer.begin(batch)
        trainer.forward_backward(batch.microbatches)
        losses.append(trainer.optim_step().metrics["loss"])
    return losses


def save(root, trainer, *, policy=None, keep=9, **state):
    return checkpoint.save(
        root,
        state=TrainState(step=trainer.version, **state),
        policy=policy or trainer.policy,
        optimizer=trainer.optimizer,
        keep=keep,
    )


def load(path, trainer):
    return checkpoint.load(path, policy=trainer.policy, optimizer=trainer.optimizer)


def weights(trainer):
    return {name: tensor.detach().clone() for name, tensor in trainer.policy.weights().items()}


@pytest.fixture(autouse=True)
def seed():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(11)
        yield


@pytest.fixture
def saved(tmp_path):
    """A checkpoint of step 2."""
    trainer = make()
    train(trainer, until=2)
    return save(tmp_path / "checkpoints", trainer)


@pytest.mark.parametrize("name", ["adamw", "adam", "sgd"])
def test_training_goes_on_bit_for_bit(tmp_path, name):
    trainer = make(name=name)
    train(trainer, until=2)
    path = save(tmp_path, trainer)
    losses, expected = train(trainer, until=5), weights(trainer)

    other = make(model=MODEL.model_copy(update={"seed": 5}), name=name, version=2)
    torch.manual_seed(99)
    load(path, other)
    assert train(other, until=5) == losses
    assert all(torch.equal(tensor, expected[key]) for key, tensor in other.policy.weights().items())


def test_the_place_in_the_stream_comes_back(tmp_path):
    path = save(tmp_path, make(version=7), next_sample=31, unfinished=(24, 29))
    expected = TrainState(step=7, next_sample=31, unfinished=(24, 29))
    assert path == tmp_path / "step_7"
    assert load(path, make()) == read_state(path) == expected


def test_the_folder_of_the_policy_is_what_the_policy_wrote(saved):
    assert set(load_file(saved / "policy" / "model.safetensors")) == set(make().policy.weights())


FILES = ["policy/model.safetensors", "optimizer.safetensors", "state.json"]


def test_the_manifest_covers_every_file(saved):
    found = {path.relative_to(saved).as_posix() for path in saved.rglob("*") if path.is_file()}
    assert found == {*FILES, MANIFEST}
    verify(saved)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("place", [0, 0.5, 1])
def test_one_flipped_bit_is_found_and_named(saved, name, place):
    path = saved / name
    data = bytearray(path.read_bytes())
    data[int(place * (len(data) - 1))] ^= 1
    path.write_bytes(data)
    before = weights(trainer := make())
    with pytest.raises(UserError, match=rf"{name} is damaged or missing"):
        load(saved, trainer)
    assert all(torch.equal(tensor, before[key]) for key, tensor in trainer.policy.weights().items())
    with pytest.raises(UserError, match=name):
        read_state(saved)


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file_is_named(saved, name):
    (saved / name).unlink()
    with pytest.raises(UserError, match=rf"{name} is damaged or missing"):
        load(saved, make())


@pytest.mark.parametrize("text", [None, "", '{"files"', "{}"], ids=["missing", "empty", "half", "no files"])
def test_without_a_manifest_it_is_no_checkpoint(saved, text):
    (saved / MANIFEST).unlink() if text is None else (saved / MANIFEST).write_text(text)
    with pytest.raises(UserError, match=rf"step_2 is not a complete checkpoint: its {MANIFEST}"):
        load(saved, make())


@pytest.mark.parametrize(
    ("change", "why"),
    [({"hidden": 5}, r"is \[\d+, 4\] there, \[\d+, 5\] in this model: another model\?"), ({"contexts": 9}, "another")],
)
def test_another_models_checkpoint_is_refused(saved, change, why):
    with pytest.raises(UserError, match=why):
        load(saved, make(model=MODEL.model_copy(update=change)))


class NoWeights(TinyPolicy):
    """Saves nothing."""

    def save(self, directory):
        directory.mkdir()


def test_weights_the_checkpoint_lacks_are_named(tmp_path):
    trainer = make()
    path = save(tmp_path, trainer, policy=NoWeights(MODEL, temperature=1.0))
    with pytest.raises(UserError, match=r"lacks 4 tensors of this model, first context.weight"):
        load(path, trainer)


class FullDisk(TinyPolicy):
    """Writes a part of its weights, then raises."""

    def __init__(self, error):
        super().__init__(MODEL, temperature=1.0)
        self._error = error

    def save(self, directory):
        super().save(directory)
        raise self._error


@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, "No space left on device"), SafetensorError("I/O error: No space left on device")]
)
def test_a_full_disk_is_told_and_earlier_checkpoints_stay(saved, error):
    root, trainer = saved.parent, make(version=4)
    with pytest.raises(UserError, match=r"step_4: .*No space left on device.* Earlier ones are untouched"):
        save(root, trainer, policy=FullDisk(error), keep=1)
    assert [path.name for path in root.iterdir()] == ["step_2"]
    assert load(saved, trainer).step == 2
    assert save(root, trainer, keep=1).name == "step_4"  # there is room again


def test_another_error_of_the_policy_is_not_hidden(tmp_path):
    with pytest.raises(RuntimeError, match="no such layer"):
        save(tmp_path, make(), policy=FullDisk(RuntimeError("no such layer")))
    assert list_steps(tmp_path) == []


def test_the_newest_are_kept(tmp_path):
    for version in (1, 5, 9, 10):
        save(tmp_path, make(version=version), keep=2)
    assert list_steps(tmp_path) == [9, 10]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_10", "step_9"]


def test_what_is_half_written_or_the_users_own_is_no_checkpoint(saved):
    root = saved.parent
    shutil.copytree(saved, root / ".step_3.partial")
    shutil.copytree(saved, root / "step_2_best")
    (root / "step_4").mkdir()
    assert list_steps(root) == [2]
    assert list_steps(root / "nowhere") == []


def test_what_a_killed_save_left_behind_is_written_over(saved):
    root, trainer = saved.parent, make(version=4)
    (root / ".step_4.partial" / "policy").mkdir(parents=True)
    (root / ".step_4.partial" / "leftover").write_text("half")
    path = save(root, trainer)
    assert not (path / "leftover").exists()
    assert load(path, trainer).step == 4
    assert list_steps(root) == [2, 4]


def test_a_checkpoint_that_is_there_is_not_written_again(saved):
    before = {path: path.stat().st_mtime_ns for path in saved.rglob("*")}
    assert save(saved.parent, make(version=2)) == saved
    assert {path: path.stat().st_mtime_ns for path in saved.rglob("*")} == before

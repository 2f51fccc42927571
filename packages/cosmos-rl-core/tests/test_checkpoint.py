"""Checkpoints of one process: whole or absent, told apart from damaged ones, and enough to go on bit for bit."""

import errno
import json
import resource
import shutil
import threading
from collections import Counter
from typing import ClassVar

import pytest
import torch
from safetensors.torch import load_file

from cosmos_rl_core.algorithms.config import AlgorithmConfig
from cosmos_rl_core.algorithms.objective import build_objective
from cosmos_rl_core.checkpoint import restore
from cosmos_rl_core.checkpoint.manifest import MANIFEST, Origin, TrainState, list_steps, read_origin, read_state, verify
from cosmos_rl_core.checkpoint.saver import CheckpointSaver, SavingRun
from cosmos_rl_core.errors import UserError
from cosmos_rl_core.observe.trace import Timeline, read_spans
from cosmos_rl_core.parallel.setup import ModelSetup
from cosmos_rl_core.recipe.sections import CheckpointSection
from cosmos_rl_core.storage.folder import Folder
from cosmos_rl_core.testing.tiny_model import TinyPolicy, collate_answers
from cosmos_rl_core.testing.tiny_task import TinyModel
from cosmos_rl_core.train.optimizers.build import build_optimizer
from cosmos_rl_core.train.trainer import Trainer
from cosmos_rl_core.types import Share

MODEL = TinyModel(actions=3, contexts=4, hidden=4)


def make(*, model=MODEL, name="adamw", version=0):
    policy = TinyPolicy(model, temperature=1.0, setup=ModelSetup())
    trainer = Trainer(
        policy,
        objective=build_objective(AlgorithmConfig(name="sft"), max_terms=3),
        optimizer=build_optimizer(
            name, policy.module, learning_rate=0.05, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.1
        ),
        lr_factor=lambda step: 1.0 / (1 + step),
        max_grad_norm=1.0,
    )
    trainer.version = version
    return trainer


def train(trainer, *, until):
    """Steps up to a version, each on rows drawn from torch's random state. Returns the losses."""
    losses = []
    while trainer.version < until:
        rows = [{"context": int(c)} for c in torch.randint(0, 4, (3,))]
        batch = collate_answers(rows, actions=3, length=3, microbatch_terms=6, share=Share())
        trainer.begin(batch)
        trainer.forward_backward(batch.microbatches)
        losses.append(trainer.optim_step().metrics["loss"])
    return losses


class Recording(SavingRun):
    """A run that keeps the reports of its saver."""

    def __init__(self, scores=None, timeline=None):
        super().__init__(timeline)
        self.complaints, self.saves = [], []
        self._scores = scores

    def scores(self):
        return {} if self._scores is None else self._scores()

    def saved(self, step, folder):
        self.saves.append((step, folder))

    def failed(self, text):
        self.complaints.append(text)


def saver_of(trainer, root, *, step=-1, section=None, **keys):
    """A saver of a run that started somewhere else."""
    section = section or CheckpointSection(every_steps=1, keep=9)
    return CheckpointSaver(section, root=Folder.at(root), trainer=trainer, state=TrainState(step=step), **keys)


def save(root, trainer, *, section=None, **state):
    """A checkpoint of the trainer as it stands, as the end of a run writes it."""
    saver = CheckpointSaver(
        section or CheckpointSection(keep=9),
        root=Folder.at(root),
        trainer=trainer,
        state=TrainState(step=trainer.version, **state),
        origin=Origin(recipe={"run": {"seed": 3}}),
    )
    return saver.finish().path


def load(path, trainer):
    return restore.load(path, policy=trainer.policy, optimizer=trainer.optimizer)


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


def test_the_place_in_the_stream_and_what_wrote_it_come_back(tmp_path):
    path = save(tmp_path, make(version=7), next_sample=31, unfinished=(24, 29))
    expected = TrainState(step=7, next_sample=31, unfinished=(24, 29))
    assert path == tmp_path / "step_7"
    assert load(path, make()) == read_state(path) == expected
    assert read_origin(path) == Origin(num_ranks=1, layout="one rank", recipe={"run": {"seed": 3}})


def test_the_folder_of_the_policy_is_a_model(saved):
    assert set(load_file(saved / "policy" / "model.safetensors")) == set(make().policy.weights())
    assert json.loads((saved / "policy" / "config.json").read_text()) == {"actions": 3}


class Adapted(TinyPolicy):
    """Saves what an adapter of peft has beside it."""

    def save_config(self, directory):
        (directory / "adapter_config.json").write_text("{}")


def test_adapters_lie_where_peft_looks_for_them(tmp_path):
    trainer = make()
    trainer.policy = Adapted(MODEL, temperature=1.0, setup=ModelSetup())
    trainer.optimizer = torch.optim.SGD(trainer.policy.module.parameters(), lr=1.0)
    path = save(tmp_path, trainer)
    assert (path / "policy" / "adapter_model.safetensors").exists()
    load(path, trainer)


FILES = ["policy/model.safetensors", "policy/config.json", "training/rank_0.safetensors", "contents.json", "state.json"]


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
    with pytest.raises(UserError, match=rf"{name} is damaged or missing"):
        read_state(saved)


@pytest.mark.parametrize("name", FILES)
def test_a_truncated_file_is_named(saved, name):
    (saved / name).write_bytes((saved / name).read_bytes()[:-1])
    with pytest.raises(UserError, match=rf"{name} is damaged or missing"):
        read_state(saved)


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file_is_named(saved, name):
    (saved / name).unlink()
    with pytest.raises(UserError, match=rf"{name} is damaged or missing"):
        read_state(saved)


@pytest.mark.parametrize("text", [None, "", '{"files"', "{}"], ids=["missing", "empty", "half", "no files"])
def test_without_a_manifest_it_is_no_checkpoint(saved, text):
    (saved / MANIFEST).unlink() if text is None else (saved / MANIFEST).write_text(text)
    with pytest.raises(UserError, match=rf"step_2 is not a complete checkpoint: its {MANIFEST}"):
        read_state(saved)


@pytest.mark.slow
def test_a_changed_bit_in_every_byte_of_every_file_is_found(saved):
    """Only white space of the manifest may differ, and what is read then is what was written."""
    state, outcomes = read_state(saved), Counter()
    for name in (*FILES, MANIFEST):
        whole = (saved / name).read_bytes()
        for place, byte in enumerate(whole):
            changed = byte ^ (1 << place % 8)
            (saved / name).write_bytes(whole[:place] + bytes([changed]) + whole[place + 1 :])
            try:
                assert read_state(saved) == state
                assert name == MANIFEST and chr(byte).isspace()
                outcomes["white space"] += 1
            except UserError:
                outcomes["refused"] += 1
        (saved / name).write_bytes(whole)
    print(dict(outcomes))
    assert read_state(saved) == state
    assert outcomes["refused"] > 50 * outcomes["white space"]


@pytest.mark.parametrize(
    ("change", "why"),
    [({"hidden": 5}, r"is \[\d+, 4\] there, \[\d+, 5\] in this model: is it of another"), ({"contexts": 9}, "another")],
)
def test_another_models_checkpoint_is_refused_and_nothing_is_changed(saved, change, why):
    trainer = make(model=MODEL.model_copy(update=change))
    before = weights(trainer)
    with pytest.raises(UserError, match=why):
        load(saved, trainer)
    assert all(torch.equal(tensor, before[key]) for key, tensor in trainer.policy.weights().items())


def test_weights_the_checkpoint_lacks_are_named(tmp_path):
    trainer = make()
    trainer.policy.module.extra = torch.nn.Parameter(torch.zeros(2))
    whole = make()
    path = save(tmp_path, whole)
    with pytest.raises(UserError, match=r"lacks 1 tensors of this model, first extra"):
        load(path, trainer)


# --- saves that fail


class FullDisk(Folder):
    """Fails after half of a file of some steps."""

    full_at: ClassVar = set()

    def write(self, name, parts):
        if name == "training/rank_0.safetensors" and any(f"step_{step}." in str(self) for step in self.full_at):
            super().write(name, [b"half"])
            raise OSError(errno.ENOSPC, "No space left on device")
        return super().write(name, parts)


@pytest.fixture
def full_disk():
    yield FullDisk
    FullDisk.full_at.clear()


def test_a_full_disk_at_the_end_is_the_runs_error_and_earlier_checkpoints_stay(saved, full_disk):
    root, trainer = saved.parent, make(version=4)
    full_disk.full_at.add(4)
    with pytest.raises(UserError, match=r"step_4: No space left on device. The newest whole checkpoint is step 2"):
        save(full_disk.at(root), trainer, section=CheckpointSection(keep=1))
    assert [path.name for path in root.iterdir()] == ["step_2"]
    assert load(saved, make()).step == 2
    full_disk.full_at.clear()  # there is room again
    assert save(full_disk.at(root), trainer, section=CheckpointSection(keep=1)).name == "step_4"


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_full_disk_on_the_way_is_told_and_training_goes_on(tmp_path, full_disk, asynchronous):
    trainer, run = make(), Recording()
    section = CheckpointSection(every_steps=1, keep=1, asynchronous=asynchronous)
    saver = saver_of(trainer, full_disk.at(tmp_path), section=section, run=run)
    full_disk.full_at.update({1, 2})
    for step in (1, 2, 3):
        train(trainer, until=step)
        saver.after_step(TrainState(step=step))
    assert saver.finish() is not None
    assert run.complaints[0] == (
        "step 1 could not be saved: No space left on device; training goes on, earlier checkpoints are untouched"
    )
    assert (
        "step 2 could not be saved: No space left on device, the save before failed too (2 in a row)"
        in run.complaints[1]
    )
    assert run.saves == [(3, str(tmp_path / "step_3"))]
    assert [path.name for path in tmp_path.iterdir()] == ["step_3"]


@pytest.mark.parametrize(("asynchronous", "ends_at"), [(True, 4), (False, 3)])
def test_failed_saves_end_the_run_and_name_the_checkpoint_to_continue_from(tmp_path, full_disk, asynchronous, ends_at):
    trainer = make()
    section = CheckpointSection(every_steps=1, asynchronous=asynchronous, max_failures=2)
    saver = saver_of(trainer, full_disk.at(tmp_path), section=section)
    full_disk.full_at.update({2, 3, 4, 5})
    with pytest.raises(UserError) as caught:
        for step in (1, 2, 3, 4, 5):
            train(trainer, until=step)
            saver.after_step(TrainState(step=step))
    assert step == ends_at
    assert "2 saves in a row have failed ([checkpoint] max_failures); the last error is No space" in str(caught.value)
    assert f"The newest whole checkpoint is step 1, in {tmp_path}; continue with --resume auto" in str(caught.value)


class Unreachable(Folder):
    """A store that nobody reaches while step 1 is saved."""

    def write(self, name, parts):
        self._must_be_there()
        return super().write(name, parts)

    def remove(self):
        self._must_be_there()
        super().remove()

    def _must_be_there(self):
        if "step_1." in str(self):
            raise OSError(errno.EHOSTUNREACH, "No route to host")


def test_a_store_that_is_out_of_reach_for_a_while_costs_one_checkpoint(tmp_path):
    trainer, run = make(), Recording()
    section = CheckpointSection(every_steps=1)
    saver = saver_of(trainer, Unreachable.at(tmp_path), section=section, run=run)
    for step in (1, 2):
        train(trainer, until=step)
        saver.after_step(TrainState(step=step))
    assert saver.finish() is not None
    [complaint] = run.complaints
    assert "step 1 could not be saved: No route to host" in complaint
    assert list_steps(tmp_path) == [2]


def test_the_systems_own_limit_is_a_full_disk(saved):
    """RLIMIT_FSIZE makes the kernel refuse to let a file grow, in the middle of a write."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with pytest.raises(UserError, match=r"cannot write the checkpoint .*step_4: File too large"):
            save(saved.parent, make(version=4))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [path.name for path in saved.parent.iterdir()] == ["step_2"]


class NoSuchLayer(TinyPolicy):
    def save_config(self, directory):
        raise RuntimeError("no such layer")


def test_another_error_of_the_policy_is_not_hidden(tmp_path):
    trainer = make()
    trainer.policy = NoSuchLayer(MODEL, temperature=1.0, setup=ModelSetup())
    with pytest.raises(RuntimeError, match="no such layer"):
        save(tmp_path, trainer)
    assert list_steps(tmp_path) == []


class Broken(Folder):
    def write(self, name, parts):
        raise ZeroDivisionError("a bug")


def test_a_bug_in_the_writing_thread_ends_the_run(tmp_path):
    trainer = make(version=1)
    saver = saver_of(trainer, Broken.at(tmp_path))
    saver.after_step(TrainState(step=1))
    with pytest.raises(ZeroDivisionError, match="a bug"):
        saver.finish()


# --- saves beside training


class SlowDisk(Folder):
    """Writes when it is let."""

    let = threading.Event()

    def write(self, name, parts):
        assert self.let.wait(30)
        return super().write(name, parts)


def test_what_is_written_beside_training_is_the_step_it_was_asked_for(tmp_path):
    SlowDisk.let.clear()
    trainer = make()
    train(trainer, until=1)
    expected = weights(trainer)
    saver = saver_of(trainer, SlowDisk.at(tmp_path), section=CheckpointSection(every_steps=1, keep=9))
    saver.after_step(TrainState(step=1))
    train(trainer, until=2)  # while nothing of step 1 is written
    assert list_steps(tmp_path) == []
    SlowDisk.let.set()
    saver.after_step(TrainState(step=2))
    saver.finish()
    assert list_steps(tmp_path) == [1, 2]
    other = make()
    load(tmp_path / "step_1", other)
    assert all(torch.equal(tensor, expected[key]) for key, tensor in other.policy.weights().items())


def test_only_due_steps_are_saved_and_the_last(tmp_path):
    trainer, timeline = make(), Timeline("policy-0")
    saver = saver_of(trainer, tmp_path, section=CheckpointSection(every_steps=2, keep=9), run=SavingRun(timeline))
    for step in (1, 2, 3, 4, 5):
        trainer.version = step
        saver.after_step(TrainState(step=step))
    assert saver.finish().name == "step_5"
    assert list_steps(tmp_path) == [2, 4, 5]
    timeline.stream(tmp_path / "spans.jsonl")
    timeline.close()
    spans = read_spans((tmp_path / "spans.jsonl").read_bytes().splitlines())
    assert [(span.name, span.args) for span in spans] == [("save", {"step": 2}), ("save", {"step": 4})]


def test_in_the_middle_of_a_step_nothing_is_saved(tmp_path):
    trainer = make(version=4)
    assert saver_of(trainer, tmp_path, step=3).finish() is None
    assert list_steps(tmp_path) == []


def test_the_checkpoint_a_run_went_on_from_is_not_written_again(saved):
    before = {path: path.stat().st_mtime_ns for path in saved.rglob("*")}
    saver = saver_of(make(version=2), saved.parent, step=2, resumed_from=str(saved))
    assert saver.finish().path == saved
    assert {path: path.stat().st_mtime_ns for path in saved.rglob("*")} == before


def test_the_checkpoint_a_run_went_on_from_is_written_again_where_somebody_removed_it(saved):
    saver = saver_of(make(version=2), saved.parent, step=2, resumed_from=str(saved))
    shutil.rmtree(saved)
    assert saver.finish().path == saved
    verify(saved)


def test_a_checkpoint_that_somebody_removed_is_told_at_the_next_save(tmp_path):
    trainer, run = make(), Recording()
    section = CheckpointSection(every_steps=1, keep=2, asynchronous=False)
    saver = saver_of(trainer, tmp_path, section=section, run=run)
    for step in (1, 2, 3, 4):
        trainer.version = step
        saver.after_step(TrainState(step=step))
        if step == 3:
            assert run.complaints == []  # step_1 was one too many
            shutil.rmtree(tmp_path / "step_2")
    assert run.complaints == [f"somebody has removed step_2 from {tmp_path}"]
    assert saver.finish().name == "step_4"
    assert len(run.complaints) == 1


def test_a_directory_that_is_renamed_right_after_a_save_is_reported_and_the_checkpoint_is_written_again(tmp_path):
    trainer, root = make(version=1), tmp_path / "checkpoints"

    def scores():
        """Called between the save and the choice of checkpoints to remove."""
        if not (tmp_path / "elsewhere").exists():
            root.rename(tmp_path / "elsewhere")
        return {}

    section = CheckpointSection(every_steps=1, keep_best=1, asynchronous=False)
    run = Recording(scores)
    saver = saver_of(trainer, root, section=section, run=run)
    saver.after_step(TrainState(step=1))
    assert run.complaints == [f"somebody has removed step_1 from {root}"]
    verify(saver.finish())


@pytest.mark.parametrize("lost", ["", "state.json"])
def test_the_last_checkpoint_is_written_again_where_it_or_a_file_of_it_was_removed(tmp_path, lost):
    """A directory that is renamed in the middle of a save takes the files with it that are written by then."""
    trainer = make()
    saver = saver_of(trainer, tmp_path, section=CheckpointSection(every_steps=1, asynchronous=False))
    trainer.version = 1
    saver.after_step(TrainState(step=1))
    gone = tmp_path / "step_1" / lost
    if lost:
        gone.unlink()
    else:
        shutil.rmtree(gone)
    verify(saver.finish())


def test_a_damaged_checkpoint_of_the_same_step_is_replaced(saved):
    (saved / "state.json").write_text("damaged")
    save(saved.parent, make(version=2))
    verify(saved)
    assert [path.name for path in saved.parent.iterdir()] == ["step_2"]


# --- which are kept


def test_the_newest_are_kept(tmp_path):
    for version in (1, 5, 9, 10):
        save(tmp_path, make(version=version), section=CheckpointSection(keep=2))
    assert list_steps(tmp_path) == [9, 10]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_10", "step_9"]


def test_the_best_are_kept_beside_the_newest(tmp_path):
    scores = {1: 0.2, 2: 0.9, 3: 0.1}
    trainer = make()
    section = CheckpointSection(every_steps=1, keep=1, keep_best=1)
    saver = saver_of(trainer, tmp_path, section=section, run=Recording(lambda: scores))
    for step in (1, 2, 3, 4):
        trainer.version = step
        saver.after_step(TrainState(step=step))
    saver.finish()
    assert list_steps(tmp_path) == [2, 4]


def test_what_is_half_written_or_the_users_own_is_no_checkpoint(saved):
    root = saved.parent
    shutil.copytree(saved, root / ".step_3.partial")
    shutil.copytree(saved, root / "step_2_best")
    (root / "step_4").mkdir()
    assert list_steps(root) == [2]
    assert list_steps(root / "nowhere") == []


def test_what_a_killed_save_left_behind_goes_with_the_next(saved):
    root, trainer = saved.parent, make(version=4)
    (root / ".step_3.partial" / "policy").mkdir(parents=True)
    (root / ".step_4.partial" / "policy").mkdir(parents=True)
    (root / ".step_4.partial" / "leftover").write_text("half")
    path = save(root, trainer)
    assert not (path / "leftover").exists()
    assert load(path, trainer).step == 4
    assert sorted(path.name for path in root.iterdir()) == ["step_2", "step_4"]


def test_a_replica_that_joined_no_mesh_leaves_later_checkpoints_of_others(tmp_path):
    """It has read step 2 and is stopped while another replica is at step 4."""
    read = save(tmp_path, make(version=2))
    save(tmp_path, make(version=4))
    for resumed_from in (str(read), ""):
        newcomer = saver_of(make(version=2), tmp_path, step=2, resumed_from=resumed_from)
        assert newcomer.finish() is None
    assert list_steps(tmp_path) == [2, 4]


def test_the_numbers_of_the_objective_are_read_back_to_the_bit(tmp_path):
    numbers = (0.1 + 0.2, 1.0)
    assert load(save(tmp_path, make(), objective=numbers), make()).objective == numbers

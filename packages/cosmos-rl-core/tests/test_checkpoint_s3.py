"""Checkpoints in an object store, against a server on this machine: complete when their manifest is there."""

import pytest
import torch

from cosmos_rl_core import run
from cosmos_rl_core.checkpoint import restore
from cosmos_rl_core.checkpoint.export import export
from cosmos_rl_core.checkpoint.manifest import MANIFEST, TrainState, list_steps, read_state
from cosmos_rl_core.checkpoint.saver import CheckpointSaver, SavingRun
from cosmos_rl_core.errors import UserError
from cosmos_rl_core.parallel.setup import ModelSetup
from cosmos_rl_core.recipe.load import load_config
from cosmos_rl_core.recipe.sections import CheckpointSection
from cosmos_rl_core.storage.folder import Folder
from cosmos_rl_core.testing.tiny_model import TinyPolicy
from cosmos_rl_core.testing.tiny_task import TinyModel
from cosmos_rl_core.train.trainer import Trainer

boto3 = pytest.importorskip("boto3")
ThreadedMotoServer = pytest.importorskip("moto.server").ThreadedMotoServer
S3FileSystem = pytest.importorskip("s3fs").S3FileSystem

pytestmark = pytest.mark.filterwarnings("ignore:datetime.datetime.utcnow:DeprecationWarning")
MODEL = TinyModel(actions=3, contexts=4, hidden=4)
RECIPE = {
    "run": {"domain": "cosmos_rl_core.testing.tiny:TINY", "name": "bandit", "placement": "inline"},
    "data": {"rows": 6},
    "rollout": {"engine": "tiny", "group_size": 4, "sampling": {"max_tokens": 3}},
    "reward": {"functions": [{"name": "hits"}]},
    "policy": {"prompts_per_step": 2},
    "sync": {"backend": "cosmos_rl_core.testing.file_sync:FileSync"},
    "logging": {"sinks": ["jsonl"]},
}


@pytest.fixture(scope="module")
def server():
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def root(server, monkeypatch, request):
    """A prefix in a bucket of this test."""
    for name, value in {
        "AWS_ENDPOINT_URL": server,
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
    }.items():
        monkeypatch.setenv(name, value)
    bucket = request.node.name.replace("_", "-").removeprefix("test-")[:63].strip("-")
    boto3.client("s3", endpoint_url=server).create_bucket(Bucket=bucket)
    return Folder.at(f"s3://{bucket}/run/checkpoints")


class Complaining(SavingRun):
    """A run that keeps the errors of its saver."""

    def __init__(self, complaints):
        super().__init__()
        self.failed = complaints.append


def make(*, seed=0):
    policy = TinyPolicy(MODEL.model_copy(update={"seed": seed}), temperature=1.0, setup=ModelSetup())
    optimizer = torch.optim.AdamW(policy.module.parameters(), lr=0.1)
    for parameter in policy.module.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return Trainer(policy, objective=None, optimizer=optimizer, lr_factor=lambda step: 1.0, max_grad_norm=1.0)


def save(root, *steps, keep=9):
    trainer = make()
    section = CheckpointSection(every_steps=1, keep=keep)
    saver = CheckpointSaver(section, root=root, trainer=trainer, state=TrainState(step=0))
    for step in steps:
        trainer.version = step
        saver.after_step(TrainState(step=step, next_sample=8 * step))
    return trainer, saver.finish()


def test_a_checkpoint_comes_back_from_a_bucket(root):
    trainer, folder = save(root, 1)
    assert str(folder) == f"{root}/step_1"
    assert read_state(str(folder)) == TrainState(step=1, next_sample=8)
    other = make(seed=5)
    restore.load(str(folder), policy=other.policy, optimizer=other.optimizer)
    for name, tensor in trainer.policy.weights().items():
        assert torch.equal(other.policy.weights()[name], tensor)


def test_the_newest_are_kept_in_a_bucket(root):
    save(root, 1, 2, 3, keep=2)
    assert list_steps(root) == [2, 3]
    assert (root / "step_1").walk() == []


def test_one_without_its_manifest_is_none_and_is_written_over(root):
    save(root, 1, 2)
    (root / "step_2")._files.rm(f"{root}/step_2/{MANIFEST}")
    (root / "step_2").write("model/rank_7.safetensors", [b"of a killed save"])
    assert list_steps(str(root)) == [1]
    save(root, 2)
    assert list_steps(root) == [1, 2]
    assert not (root / "step_2").has("model/rank_7.safetensors")


def test_a_damaged_object_is_named(root):
    save(root, 1)
    (root / "step_1").write("state.json", [b"{}"])
    with pytest.raises(UserError, match=r"s3://.*/step_1/state.json is damaged or missing"):
        read_state(str(root / "step_1"))


def test_a_store_that_refuses_is_a_failed_save_and_training_goes_on(root):
    told = []
    trainer = make()
    nowhere = Folder.at("s3://no-such-bucket/run")
    section = CheckpointSection(every_steps=1)
    saver = CheckpointSaver(section, root=nowhere, trainer=trainer, state=TrainState(step=0), run=Complaining(told))
    trainer.version = 1
    saver.after_step(TrainState(step=1))
    with pytest.raises(UserError, match=r"cannot write the checkpoint s3://no-such-bucket/run/step_1"):
        saver.finish()
    assert "step 1 could not be saved" in told[0]


def test_a_store_that_does_not_answer_is_told_before_anything_starts(root, tmp_path, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    S3FileSystem.clear_instance_cache()
    recipe = load_config(RECIPE, [f'checkpoint.path="{root}"', f'run.output_dir="{tmp_path}"', "run.max_steps=2"])
    for resume in (None, "auto", f"{root}/step_1"):
        with pytest.raises(UserError, match=r"checkpoints in s3://.* cannot be reached: Could not connect"):
            run(recipe, resume=resume)
    S3FileSystem.clear_instance_cache()


def test_a_run_keeps_its_checkpoints_in_a_bucket_and_goes_on_from_there(root, tmp_path):
    changes = [f'checkpoint.path="{root}"', f'run.output_dir="{tmp_path}"', "checkpoint.every_steps=1"]
    first = run(load_config(RECIPE, [*changes, "run.max_steps=2"]))
    assert (first.checkpoint, first.checkpoint_url) == (None, f"{root}/step_2")
    second = run(load_config(RECIPE, [*changes, "run.max_steps=3"]), resume="auto")
    assert [row["step"] for row in second.metrics] == [2]
    assert export(str(tmp_path), tmp_path / "model").checkpoint == f"{root}/step_3"


def test_an_unknown_kind_of_place_is_the_users_error():
    with pytest.raises(UserError, match=r"cannot open nope://x: .*a URL such as s3://"):
        Folder.at("nope://x")


def test_settings_of_s3_of_our_own_come_before_those_of_aws(server, monkeypatch):
    boto3.client(
        "s3", endpoint_url=server, aws_access_key_id="x", aws_secret_access_key="x", region_name="us-east-1"
    ).create_bucket(Bucket="own-settings")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    for name, value in {
        "ENDPOINT_URL": server,
        "ACCESS_KEY_ID": "test",
        "SECRET_ACCESS_KEY": "test",
        "REGION_NAME": "us-east-1",
    }.items():
        monkeypatch.setenv(f"PROD_S3_CHECKPOINT_{name}", value)
    folder = Folder.at("s3://own-settings/run")
    folder.write("state.json", [b"{}"])
    assert folder.read("state.json") == b"{}"


def test_half_a_key_is_an_error_that_names_the_other_half(monkeypatch):
    monkeypatch.setenv("PROD_S3_CHECKPOINT_ACCESS_KEY_ID", "test")
    monkeypatch.delenv("PROD_S3_CHECKPOINT_SECRET_ACCESS_KEY", raising=False)
    with pytest.raises(UserError, match="PROD_S3_CHECKPOINT_SECRET_ACCESS_KEY is not"):
        Folder.at("s3://bucket/run")

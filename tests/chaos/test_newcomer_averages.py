"""A policy that joins takes the averages of the weights of a peer (EMA): afterwards both are equal, to the bit."""

import signal

import pytest
from lives import SUPPORT, journal_of, must_have_equal_weights
from wfm_fixtures import pixel_model, recipe

from cosmos_rl_core.checkpoint.contents import AVERAGE, MODEL
from cosmos_rl_core.checkpoint.manifest import list_steps
from cosmos_rl_core.checkpoint.reader import CheckpointReader
from cosmos_rl_core.control.ledger import records
from cosmos_rl_core.storage.folder import Folder

pytestmark = [pytest.mark.ci, pytest.mark.timeout(400)]


def test_a_newcomer_has_the_averages_of_the_others(tmp_path, monkeypatch, write_recipe, start, wait_for, finished):
    run_dir, digests = tmp_path / "run", tmp_path / "digests"
    digests.mkdir()
    monkeypatch.setenv("PYTHONPATH", SUPPORT)
    monkeypatch.setenv("DIGESTS", str(digests))
    tables = recipe(
        run={"domain": "recorded:DOMAIN", "output_dir": str(run_dir), "max_steps": 100_000},
        model=pixel_model(ema={"decay": 0.9}).model_dump(mode="json", exclude_none=True),
        policy={
            "prompts_per_step": 2,
            "microbatch_terms": 6,
            "threads": 1,
            "optimizer": {"learning_rate": 1e-2},
        },
        checkpoint={"every_steps": 5},
    )
    process = start("run", write_recipe(tmp_path / "run.toml", tables))

    def votes(name):
        return sum(name in record.voters for record in journal_of(run_dir) if isinstance(record, records.Commit))

    def is_there(condition):
        assert process.poll() is None, process.communicate()
        return condition()

    wait_for(lambda: is_there(lambda: list_steps(run_dir / "checkpoints")), "a checkpoint")
    newcomer = start("worker", "--role", "policy", "--name", "newcomer", "--run", run_dir)
    wait_for(lambda: is_there(lambda: votes("newcomer") >= 3), "three steps with the newcomer")
    process.send_signal(signal.SIGINT)
    finished(process, 130)
    finished(newcomer)
    assert must_have_equal_weights(digests) >= 3
    with CheckpointReader(Folder.at(run_dir / f"checkpoints/step_{list_steps(run_dir / 'checkpoints')[-1]}")) as reader:
        averages = [name for name in reader.contents.tensors if name.startswith(MODEL + AVERAGE)]
        assert averages
        assert any(
            (reader.whole(name) - reader.whole(name.replace(AVERAGE, "", 1))).abs().max() > 1e-3 for name in averages
        ), "the averages are the weights themselves, which the newcomer has in any case"

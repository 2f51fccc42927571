"""rows_dropped.jsonl, and what the closing table says of it."""

from cosmos_rl_core.launch.observer import RunObserver
from cosmos_rl_core.observe.rollouts import DROPPED, first_reasons, write_dropped
from cosmos_rl_core.recipe.load import load_config
from cosmos_rl_core.workers.directory import FILES, LOGS

RECIPE = {
    "run": {"domain": "cosmos_rl_core.testing.tiny:TINY", "max_steps": 4},
    "model": {"actions": 3, "contexts": 5},
    "data": {"rows": 6},
    "reward": {"functions": [{"name": "hits"}]},
    "logging": {"sinks": ["console"]},
}


def test_the_first_reasons_of_a_run_are_read(tmp_path):
    assert first_reasons(tmp_path, first_step=0, count=3) == []
    write_dropped(tmp_path / "run", step=0, reasons=["old"])
    write_dropped(tmp_path / "run", step=2, reasons=["a: gone", "b: größer"])
    write_dropped(tmp_path / "run", step=3, reasons=["c", "d"])
    with (tmp_path / "run" / DROPPED).open("a") as file:
        file.write('{"step": 4, "rea')  # the run was killed
    assert first_reasons(tmp_path / "run", first_step=1, count=3) == ["a: gone", "b: größer", "c"]
    assert len(first_reasons(tmp_path / "run", first_step=0, count=9)) == 5


def finished(directory, *, dropped):
    """What the console says of a run from step 2, which repeats what an earlier one did."""
    write_dropped(directory, step=1, reasons=["of an earlier run"])
    write_dropped(directory, step=2, reasons=["repeated now"])
    with RunObserver(load_config(RECIPE), directory, first_step=2, first_evaluated=2, max_steps=4) as observer:
        for step, number in enumerate(dropped, start=2):
            if number:
                write_dropped(directory, step=step, reasons=[f"clip{step}.mp4: is cut off"])
            observer.step(step, {"loss": 1.0, "rows_dropped": number, "data_term/rows_dropped": number})
        observer.finish(steps=4, trained=4, checkpoint="", counts={}, reasons={}, wall_s=1.0, interrupted=False)


def test_the_closing_table_counts_dropped_rows_and_names_the_first(tmp_path, capsys):
    finished(tmp_path / "run", dropped=[1.0, 2.0])
    told = " ".join(capsys.readouterr().out.split())
    assert "rows dropped 6; clip2.mp4: is cut off; clip3.mp4: is cut off" in told


def test_a_run_that_dropped_none_says_nothing_of_it(tmp_path, capsys):
    finished(tmp_path / "run", dropped=[0.0, 0.0])
    assert "rows dropped" not in capsys.readouterr().out


def test_a_resumed_run_keeps_what_can_be_read_and_a_new_one_begins_without():
    assert DROPPED in LOGS and DROPPED in FILES

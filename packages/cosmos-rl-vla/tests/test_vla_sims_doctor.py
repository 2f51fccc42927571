"""The doctor of simulators: what plays, what it shows, and what to do where it does not."""

import numpy as np
import pytest
import typer
from PIL import Image
from typer.testing import CliRunner

from cosmos_rl_vla.sims import doctor
from cosmos_rl_vla.sims.doctor import Probe, Report, examine
from cosmos_rl_vla.sims.reach import Reach

SIMS = "cosmos_rl_vla.sims"


def look(name, probe, folder):
    return examine(name, probe, folder=folder, python=None, start_timeout_s=60.0)


def test_what_plays_is_shown_and_timed(tmp_path):
    report = look(f"{SIMS}.reach:Reach", Probe("red"), tmp_path)
    assert report.plays and report.cells[1] == "board 32x32" and int(report.cells[2]) > 0
    reach = Reach()
    reach.reset("red", 0)
    (path,) = tmp_path.glob("*_board.png")
    assert str(path) in report.note
    np.testing.assert_array_equal(np.asarray(Image.open(path)), reach.observe().images["board"])


@pytest.mark.parametrize(
    ("where", "probe", "advice"),
    [
        (f"{SIMS}.reach:Reach", Probe("mauve"), "no task 'mauve'"),
        ("vla_faulty:Faulty", Probe("red", {"at_start": "user"}), "the simulator needs another machine"),
        ("vla_faulty:Faulty", Probe("red", {"at_start": "exit"}), "about to exit"),
    ],
)
def test_what_does_not_play_says_why(where, probe, advice, tmp_path):
    report = look(where, probe, tmp_path)
    assert not report.plays and advice in report.note


def test_the_table(tmp_path, monkeypatch):
    monkeypatch.setattr(doctor, "PROBES", {f"{SIMS}.reach:Reach": Probe("red"), f"{SIMS}.x:Y": Probe("red")})
    app = typer.Typer()
    app.command()(doctor.main)
    names = list(doctor.PROBES)
    result = CliRunner().invoke(app, [*names, "--pictures", str(tmp_path)])
    assert result.exit_code == 1
    head, reach, missing, *_ = result.output.splitlines()
    assert head.split() == ["SIMULATOR", "PLAYS", "CAMERAS", "STEPS/S", "RENDERS", "WITH"]
    assert reach.split()[1:4] == ["yes", "board", "32x32"] and missing.split()[1:] == ["no"]
    assert "cannot be imported" in result.output
    assert CliRunner().invoke(app, [names[0], "--pictures", str(tmp_path)]).exit_code == 0
    assert CliRunner().invoke(app, ["nobody"]).exit_code == 2


def test_the_checks_of_the_machine_play_what_is_installed(monkeypatch):
    played = []

    def examine(name, probe, **_):
        played.append(name)
        if name == "metaworld":
            return Report(name, note="no EGL device")
        return Report(name, ("yes", "board 32x32", "900", "itself"))

    monkeypatch.setattr(doctor, "examine", examine)
    monkeypatch.delenv("ROBOTWIN_PATH", raising=False)
    installed = {"gymnasium", "metaworld", "sapien"}
    monkeypatch.setattr(doctor, "find_spec", lambda name: name if name in installed else None)
    lines = {line.name: line for line in doctor.checks()}
    assert played == ["gymnasium", "metaworld", "reach"]
    assert lines["simulator reach"].text == "900 steps/s, cameras: board 32x32, renders with itself"
    assert (lines["simulator metaworld"].level, lines["simulator metaworld"].text) == ("bad", "no EGL device")
    assert lines["simulators"].text == "not installed here: behavior, libero, maniskill, maniskill_batch, robotwin"
    monkeypatch.setenv("ROBOTWIN_PATH", "/opt/robotwin")
    assert doctor.PROBES["robotwin"].is_installed

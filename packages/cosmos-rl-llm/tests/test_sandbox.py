"""The sandbox for its callers: results, layers, refusals, and what happens when its processes die."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import shutil
import signal
from pathlib import Path

import pytest

from cosmos_rl_core.errors import UserError
from cosmos_rl_core.ops.doctor.machine import run_check
from cosmos_rl_llm.sandbox.inside import seccomp
from cosmos_rl_llm.sandbox.sandbox import Sandbox, SandboxLayers, SandboxLost, SandboxOptions, checks, run_python
from cosmos_rl_llm.tools.functions import function_tool

HEADERS = {
    "x86_64": Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h"),
    "aarch64": Path("/usr/include/asm-generic/unistd.h"),
}


def made(**options):
    """A sandbox for honest programs on a busy machine."""
    sandbox = Sandbox(SandboxOptions(**{"timeout_s": 30.0, **options}))
    try:
        sandbox.started()
    except UserError as error:
        pytest.skip(str(error))
    return sandbox


def test_a_result():
    sandbox = made()
    result = sandbox.run_blocking("import sys\nprint(input() * 2)\nprint('ü', file=sys.stderr)", "ab\n")
    assert (result.status, result.exit_code, result.stdout, result.stderr) == ("passed", 0, "abab\n", "ü\n")
    assert 0 < result.seconds < 30
    assert asyncio.run(sandbox.run("print(1)")).stdout == "1\n"


@pytest.mark.parametrize(
    ("program", "status", "exit_code", "text"),
    [
        ("exit(3)", "error", 3, ""),
        ("import sys; sys.exit('no')", "error", 1, "no\n"),
        ("def f():\n    return 1 / 0\nf()", "error", 2, '  File "answer.py", line 2, in f\n    return 1 / 0\n'),
        ("def f(", "error", 3, "SyntaxError"),
        ("import ctypes; ctypes.string_at(0)", "error", -signal.SIGSEGV, ""),
        ("import os; os.abort()", "error", -signal.SIGABRT, ""),
        ("\0", "error", 3, "null bytes"),
        ("print('\\ud800')", "error", 2, "UnicodeEncodeError"),
    ],
)
def test_a_program_that_fails(program, status, exit_code, text):
    result = made().run_blocking(program)
    assert result.status == status
    assert result.exit_code in (exit_code, -signal.SIGSEGV if exit_code == -signal.SIGABRT else exit_code)
    assert text in result.stderr
    assert "server.py" not in result.stderr


def test_a_program_is_an_ordinary_one():
    program = """
import asyncio, atexit, concurrent.futures, json, os, sqlite3, ssl, sys, tempfile, zoneinfo
from dataclasses import dataclass

@dataclass
class Point:
    x: int

async def main():
    await asyncio.sleep(0)
    return __name__

with concurrent.futures.ThreadPoolExecutor() as pool:
    print(*pool.map(lambda x: x * 2, [1, 2]))
with tempfile.NamedTemporaryFile("w+") as file:
    file.write("kept"), file.seek(0)
    print(file.read(), asyncio.run(main()), Point(1), sys.argv, len(sys.stdin.read()))
atexit.register(print, "the end")
"""
    result = made().run_blocking(program, "x" * 100_000)
    assert result.stderr == ""
    assert result.stdout == "2 4\nkept __main__ Point(x=1) ['answer.py'] 100000\nthe end\n"


def test_the_same_program_has_the_same_result_in_each_server():
    program = "import random; print(random.random(), hash('a'), {str(i) for i in range(99)})"
    assert made().run_blocking(program).stdout == made().run_blocking(program).stdout


def test_binary_output_is_text():
    assert made().run_blocking("import sys; sys.stdout.buffer.write(b'a\\xff')").stdout == "a\N{REPLACEMENT CHARACTER}"


def test_limits_of_one_run():
    sandbox = made()
    assert sandbox.run_blocking("while True: pass", timeout_s=0.2).status == "timeout"
    assert sandbox.run_blocking("x = bytearray(2**30)").status == "memory"
    assert sandbox.run_blocking("x = bytearray(2**30)", memory_bytes=2**32).status == "passed"


def test_packages():
    assert "ModuleNotFoundError" in made().run_blocking("import numpy").stderr
    result = made(packages=("numpy",), memory_bytes=2**31).run_blocking("import numpy; print(numpy.arange(3).sum())")
    assert result.stdout == "3\n", result.stderr


def test_arrays_are_plain_data_for_tests():
    sandbox = made(packages=("numpy",), memory_bytes=2**31)
    answer = "import numpy as np\ndef f(x): return np.arange(x), np.int64(x)"
    result, _ = asyncio.run(sandbox.run_tests(answer, "assert f(3) == ([0, 1, 2], 3)"))
    assert result.status == "passed", result.stderr


def test_a_package_that_is_missing_is_one_clear_error():
    with pytest.raises(UserError, match=r"did not start .*No module named 'no_such_package'"):
        Sandbox(SandboxOptions(packages=("no_such_package",))).started()


def test_it_prints_its_layers(caplog):
    with caplog.at_level(logging.INFO):
        made()
    for layer in ("namespaces", "mounts", "landlock", "seccomp", "limits"):
        assert re.search(rf"^sandbox: {layer}: .+", "\n".join(caplog.messages), re.MULTILINE)


def test_the_doctor_has_a_line_for_each_layer():
    lines = run_check("sandbox", checks)
    assert [line.name for line in lines] == [
        f"sandbox: {layer}" for layer in ("namespaces", "mounts", "landlock", "seccomp", "limits")
    ]
    assert all(line.fix for line in lines if line.level != "ok")


@pytest.mark.parametrize("layers", [("namespaces", "mounts", "seccomp"), ("namespaces", "mounts", "landlock"), ()])
def test_it_refuses_to_run_unprotected(layers):
    with pytest.raises(UserError, match=r"cannot protect this machine .*unprotected = true"):
        Sandbox(SandboxOptions(layers=layers, bubblewrap="never")).started()
    assert Sandbox(SandboxOptions(layers=layers, unprotected=True)).run_blocking("print(1)").stdout == "1\n"


def test_without_namespaces_a_program_has_no_files_and_no_signals():
    sandbox = made(layers=("landlock", "seccomp"))
    assert sandbox.run_blocking("print(1)").stdout == "1\n"
    assert "PermissionError" in sandbox.run_blocking("import os; os.kill(os.getpid(), 0)").stderr
    assert "PermissionError" in sandbox.run_blocking("open('/tmp/file', 'w')").stderr


def test_files_are_protected_by_landlock_or_by_bubblewrap_that_hides_processes():
    def has_files(*missing, bubblewrap):
        return SandboxLayers(dict.fromkeys(missing, "no"), 0, True, "", bubblewrap).has_files

    assert has_files("mounts", bubblewrap=False)
    assert has_files("landlock", bubblewrap=True)
    assert not has_files("landlock", bubblewrap=False)
    assert not has_files("landlock", "mounts", bubblewrap=True)


def test_bubblewrap_protects_files_where_there_is_no_landlock():
    if shutil.which("bwrap") is None:
        pytest.skip("there is no bwrap here")
    sandbox = Sandbox(SandboxOptions(layers=("namespaces", "mounts", "seccomp"), bubblewrap="always", timeout_s=30.0))
    assert sandbox.run_blocking("open('mine', 'w').write('x'); print(open('mine').read())").stdout == "x\n"
    assert "FileNotFoundError" in sandbox.run_blocking(f"open({__file__!r})").stderr
    assert "FileNotFoundError" in sandbox.run_blocking("open('/proc/self/environ')").stderr
    assert sandbox.started().bubblewrap


def test_bubblewrap_that_is_missing(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(UserError, match="there is no bwrap here; install bubblewrap"):
        Sandbox(SandboxOptions(bubblewrap="always")).started()


def test_a_server_that_was_killed_is_replaced():
    sandbox = made(files_bytes=16 * 2**20 + 6)
    marker = b'"files_bytes":' + str(16 * 2**20 + 6).encode()
    (server,) = [
        int(entry.name)
        for entry in Path("/proc").glob("[0-9]*")
        if entry.name != str(os.getpid()) and marker in (entry / "cmdline").read_bytes()
    ]
    os.kill(server, signal.SIGKILL)
    os.waitid(os.P_PID, server, os.WEXITED | os.WNOWAIT)
    with pytest.raises(SandboxLost):
        sandbox.run_blocking("print(1)")
    assert sandbox.run_blocking("print(1)").stdout == "1\n"


def test_a_fork_of_this_process_starts_its_own_server():
    sandbox = made()
    child = os.fork()
    if child == 0:
        os._exit(sandbox.run_blocking("print(1)").stdout != "1\n")
    assert os.waitpid(child, 0)[1] == 0
    assert sandbox.run_blocking("print(2)").stdout == "2\n"


def test_the_tool_returns_what_a_program_prints():
    made()
    assert run_python("print(6 * 7)") == "42\n"
    assert run_python("1 / 0").endswith("ZeroDivisionError: division by zero\n\n[the program has failed]")


def test_the_environment_of_tools_has_it():
    made()
    tool = function_tool("cosmos_rl_llm:run_python")
    assert list(tool.schema["function"]["parameters"]["properties"]) == ["code"]
    assert asyncio.run(tool.call({"code": "print(6 * 7)"}, timeout_s=60.0)) == "42\n"


def test_the_table_of_system_calls_is_the_kernels():
    for machine, header in HEADERS.items():
        if not header.exists():
            pytest.skip("there are no headers of the kernel here")
        text = header.read_text()
        for name, number in seccomp.calls(seccomp.DENIED + seccomp.SIGNALS + seccomp.CONDITIONAL, machine).items():
            assert re.search(rf"#define __NR(3264)?_{name}\s+{number}\b", text), (machine, name, number)


def test_another_architecture_has_no_filter():
    with pytest.raises(OSError, match="no filter for riscv64"):
        seccomp.program("riscv64", denies_signals=True)

"""Attacks by a program. Each fails in the sandbox; most are seen to succeed without the layer that stops them."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from functools import cache
from pathlib import Path

import pytest

from cosmos_rl_core.processes import is_alive
from cosmos_rl_llm.rewards.code import CodeReward, CodeTest
from cosmos_rl_llm.sandbox.sandbox import Sandbox, SandboxOptions

MIB = 2**20
DEADLINE_S = 30.0
"""For honest work on a busy machine."""


@cache
def sandbox(*layers, **options):
    """A sandbox with all layers, or with some of them."""
    if layers:
        options |= {"layers": [layer for layer in layers if layer != "none"], "unprotected": True}
    made = Sandbox(SandboxOptions(bubblewrap="never", **{"timeout_s": DEADLINE_S, **options}))
    missing = {layer: reason for layer, reason in made.started().missing.items() if layer in made.options.layers}
    if missing:
        pytest.skip(f"this machine lacks layers of the sandbox: {missing}")
    return made


def attack(program, *layers, **options):
    return sandbox(*layers, **options).run_blocking(program)


def test_reading_a_file_outside():
    program = f"print(open({__file__!r}).read()[:20])"
    stopped = attack(program)
    assert stopped.status == "error"
    assert "PermissionError" in stopped.stderr
    assert attack(program, "namespaces", "mounts", "seccomp").stdout.startswith('"""Attacks')


@pytest.mark.parametrize("layer", ["landlock", "mounts"])
def test_writing_a_file_outside(layer, request):
    target = Path(__file__).with_name(f"attack-{os.getpid()}-{layer}")
    request.addfinalizer(lambda: target.unlink(missing_ok=True))
    program = f"open({str(target)!r}, 'w').write('here')"
    layers = ("namespaces", "mounts") if layer == "mounts" else ("landlock",)
    for stopped in (attack(program), attack(program, *layers)):
        assert stopped.status == "error"
        assert not target.exists()
    if os.access(target.parent, os.W_OK):
        assert attack(program, "none").status == "passed"
        assert target.read_text() == "here"


def test_changing_the_mode_of_a_file_outside(tmp_path):
    """Landlock does not see it."""
    target = tmp_path / "file"
    target.touch(mode=0o600)
    program = f"import os; os.chmod({str(target)!r}, 0o777)"
    for layers in ((), ("seccomp",), ("namespaces", "mounts")):
        assert attack(program, *layers).status == "error"
        assert target.stat().st_mode & 0o777 == 0o600
    assert attack(program, "landlock").status == "passed"
    assert target.stat().st_mode & 0o777 == 0o777


def test_a_connection_by_tcp():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        program = f"import socket; socket.create_connection(('127.0.0.1', {port})).sendall(b'secret')"
        for layers in ((), ("seccomp",), ("namespaces",), ("landlock",)):
            assert attack(program, *layers).status == "error"
        assert attack(program, "none").status == "passed"
        with server.accept()[0] as accepted:
            assert accepted.recv(6) == b"secret"


def test_a_datagram_by_udp():
    """Landlock does not see it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as server:
        server.bind(("127.0.0.1", 0))
        server.setblocking(False)
        address = server.getsockname()
        program = f"import socket; socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'secret', {address})"
        for layers in ((), ("seccomp",), ("namespaces",)):
            assert attack(program, *layers).status == "error"
        with pytest.raises(BlockingIOError):
            server.recv(6)
        assert attack(program, "landlock").status == "passed"
        assert server.recv(6) == b"secret"


def test_a_datagram_by_a_pair_of_sockets(tmp_path):
    """A socket of a pair exists before any filter would see an address."""
    path = str(tmp_path / "server")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as server:
        server.bind(path)
        server.setblocking(False)
        program = f"import socket; a, b = socket.socketpair(type=socket.SOCK_DGRAM); a.sendto(b'secret', {path!r})"
        for layers in ((), ("seccomp",)):
            assert attack(program, *layers).status == "error"
        with pytest.raises(BlockingIOError):
            server.recv(6)
        assert attack(program, "none").status == "passed"
        assert server.recv(6) == b"secret"


FORKS = """
import os, time
forks = 0
for _ in range(40):
    try:
        if os.fork() == 0:
            time.sleep(1000)
    except OSError:
        break
    forks += 1
print(forks)
"""


def processes_with(marker):
    """Processes that were started with these words."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if marker.encode() in (entry / "cmdline").read_bytes():
                found.append(int(entry.name))
        except OSError:  # it has ended
            continue
    return found


def until(condition, deadline_s=60.0):
    """Wait for a condition."""
    end = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end, "it did not come true"
        time.sleep(0.02)


def test_a_fork_bomb():
    assert attack(FORKS).stdout == "0\n"
    assert attack(FORKS, "seccomp").stdout == "0\n"
    size = 16 * MIB + 1
    assert attack(FORKS, "namespaces", "mounts", "landlock", files_bytes=size).stdout == "40\n"
    until(lambda: len(processes_with(str(size))) == 1)  # of 41 processes the server remains


def test_a_bomb_of_threads_is_bounded():
    program = """
import threading, time
made = 0
try:
    while made < 10000:
        threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()
        made += 1
except RuntimeError:
    pass
print(made)
"""
    assert 0 < int(attack(program, memory_bytes=256 * MIB).stdout) < 1000


DAEMON = """
import os, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        print(os.getpid(), flush=True)
        os.closerange(0, 3)
        time.sleep(1000)
    os._exit(0)
os.wait()
time.sleep(0.2)  # the daemon prints; if it is late, the test still only asks for what runs
"""


def test_a_daemon_that_survives():
    assert attack(DAEMON).status == "error"
    size = 16 * MIB + 2
    attack(DAEMON, "namespaces", "mounts", "landlock", files_bytes=size)
    until(lambda: len(processes_with(str(size))) == 1)
    size = 16 * MIB + 3
    survivor = attack(DAEMON, "landlock", files_bytes=size)
    pid = int(survivor.stdout)
    assert is_alive(pid)
    os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("layer", ["all", "namespaces", "landlock", "seccomp"])
def test_a_signal_to_another_process(layer):
    with subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE) as victim:
        program = f"import os; os.kill({victim.pid}, 9)"
        try:
            assert attack(program, *([] if layer == "all" else [layer])).status == "error"
            assert victim.poll() is None
            if layer == "all":
                attack(program, "none")
                assert victim.wait() == -signal.SIGKILL
        finally:
            victim.kill()


def test_signals_to_all_processes():
    """Process 1 of a namespace gets none of them, and nobody else does."""
    result = attack("import os\nfor pid in (-1, 1, os.getppid()):\n  try: os.kill(pid, 15)\n  except OSError: pass\n")
    assert result.status in ("passed", "error")
    assert attack("print(1)").stdout == "1\n"


def test_memory():
    program = "print(len(bytearray(2**30)))"  # its pages are not touched
    assert attack(program, memory_bytes=256 * MIB).status == "memory"
    assert attack(program, memory_bytes=4096 * MIB).stdout == f"{2**30}\n"


def test_memory_in_a_file_without_a_name():
    program = "import os; fd = os.memfd_create('m'); print(os.write(fd, b'x' * 10**6))"
    assert attack(program).status == "error"
    assert attack(program, "none").stdout == f"{10**6}\n"


FILL = """
total = 0
try:
    for i in range(64):
        with open(f"file-{i}", "wb") as file:
            for _ in range(16):
                file.write(bytes(2**18)), file.flush()
                total += 2**18
except OSError as error:
    print(type(error).__name__, error.errno)
print(total)
"""


def test_filling_the_disk():
    error, total = attack(FILL, files_bytes=8 * MIB).stdout.splitlines()
    assert error in ("OSError 28", "OSError 27")  # no space, or a file that is too large
    assert 4 * MIB <= int(total) <= 8 * MIB
    assert attack(FILL, files_bytes=512 * MIB).stdout == f"{256 * MIB}\n"
    assert attack("import os; print(os.listdir('.'))").stdout == "[]\n"  # another program's files are gone


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_endless_output(stream):
    program = f"import sys\nwhile True: sys.{stream}.write('x' * 1000)"
    result = attack(program, output_bytes=1000)
    assert result.status == "output"
    assert len(result.stdout) + len(result.stderr) == 1000


@pytest.mark.parametrize(
    "program",
    [
        "import time; time.sleep(1000)",
        "import signal, time\nfor s in (1, 2, 3, 14, 15): signal.signal(s, signal.SIG_IGN)\nwhile True: time.sleep(1)",
        "while True:\n  try:\n    while True: pass\n  except BaseException: pass",
        "import atexit, time; atexit.register(time.sleep, 1000)",
        "import threading, time; threading.Thread(target=time.sleep, args=(1000,)).start()",
        "(9**9)**(9**9)",
    ],
)
def test_work_past_the_deadline(program):
    result = sandbox().run_blocking(program, timeout_s=0.5)
    assert result.status == "timeout"
    assert result.seconds < 500


@pytest.mark.parametrize(
    "program",
    [
        "import ctypes; libc = ctypes.CDLL(None, use_errno=True); assert libc.unshare(0x10000000) == 0",
        "import ctypes; libc = ctypes.CDLL(None); assert libc.mount(b'none', b'/', b'tmpfs', 0, None) == 0",
        "import ctypes; libc = ctypes.CDLL(None); assert libc.ptrace(0, 0, 0, 0) == 0",
        "import ctypes; libc = ctypes.CDLL(None); assert libc.syscall(425, 8, ctypes.create_string_buffer(120)) >= 0",
        "import ctypes; libc = ctypes.CDLL(None); assert libc.syscall(451, 0) == 0",
        "import os; os.execv('/bin/true', ['true'])",
        "import subprocess; subprocess.run(['/bin/true'])",
        "import os; os.symlink('/etc', 'link'); os.listdir('link')",
        "import os; os.listdir('/')",
        "import os; os.listdir('/proc')",
        "open('/proc/self/environ').read()",
        "import os; os.unlink('/etc/hostname')",
        "import os; os.rename('/etc/hostname', 'mine')",
        "import os; os.link('/etc/hostname', 'mine')",
        "import os; os.truncate('/etc/hostname', 0)",
        "import os; os.setuid(0)",
        "import os; os.chroot('.')",
        "open('/dev/sda', 'rb').read(1)",
        "open('/dev/tty')",
    ],
)
def test_calls_of_the_kernel(program):
    result = attack(program)
    assert result.status == "error"
    assert result.exit_code in (1, 2)


def test_descriptors_of_the_server_are_closed():
    program = "import os\nfor i in range(3, 1000):\n  try: os.fstat(i); print(i)\n  except OSError: pass"
    assert attack(program).stdout == ""


SECRET = "swordfish"
SEARCH = r"""
import gc, os, re, sys

def guess():
    texts = [repr(sys.argv), repr(dict(os.environ))]
    frame = sys._getframe()
    while frame:
        texts += [repr(frame.f_locals), repr(frame.f_globals.get("__loader__") and vars(frame.f_globals["__loader__"]))]
        frame = frame.f_back
    texts += [text for text in gc.get_objects() if isinstance(text, str)]
    texts += [repr(each) for each in gc.get_objects() if isinstance(each, (dict, list, tuple))]
    for fd in (0, *range(4, 64)):
        try:
            texts.append(os.read(fd, 10**6).decode())
        except OSError:
            pass
    for name in ("/proc/self/mem", "/proc/1/cmdline", "/proc/self/environ", "answer.py", "tests.py"):
        try:
            texts.append(open(name).read())
        except (OSError, UnicodeDecodeError):
            pass
    for text in texts:
        if match := re.search(r"guess\(\) == \W*([a-z]+)", text):
            return match[1]
"""


def verdict(program, test, **options):
    reward = CodeReward(sandbox=SandboxOptions(bubblewrap="never", **{"timeout_s": DEADLINE_S, **options}))
    sandbox()  # skips where the machine lacks a layer
    (only,) = asyncio.run(reward.verdicts(program, [test]))
    return only


def test_reading_the_tests():
    test = f"assert guess() == '{SECRET}'"
    assert attack(f"{SEARCH}\n{test}").status == "passed"  # in one process with its test it finds it
    assert verdict(SEARCH, CodeTest(code=test)) == "wrong"
    assert verdict(f"def guess(): return '{SECRET}'", CodeTest(code=test)) == "passed"


def test_reading_the_expected_output():
    program = f"{SEARCH}\nprint(guess())"
    assert verdict(program, CodeTest(stdin="guess() ==", stdout=SECRET)) == "wrong"


FAKES = {
    "prints": "print('passed', flush=True)\ndef f(x): return None",
    "exits": "import sys; sys.exit(0)",
    "exits when called": "import sys\ndef f(x): sys.exit(0)",
    "exits at once": "import os\ndef f(x): os._exit(0)",
    "is equal to everything": "class All:\n  __eq__ = lambda s, o: True\n  __hash__ = None\ndef f(x): return All()",
    "is a number equal to everything": "class All(int):\n  __eq__ = lambda s, o: True\ndef f(x): return All(0)",
    "is a list equal to everything": "class All(list):\n  __eq__ = lambda s, o: True\ndef f(x): return All()",
    "computes itself": "class All:\n  __sub__ = __abs__ = __rsub__ = lambda *a: 0\n  __lt__ = lambda *a: True\n"
    "def f(x): return All()",
    "replaces builtins": "import builtins\nbuiltins.abs = builtins.all = abs = all = lambda *a: 0\ndef f(x): return 5",
    "replaces a module": "import math\nclass math:\n  isclose = lambda *a: True\ndef f(x): return 5",
    "patches math": "import math\nmath.isclose = lambda *a: True\ndef f(x): return 5",
    "raises the end of a loop": "def f(x): raise StopIteration",
    "raises the end of a process": "def f(x): raise SystemExit(0)",
    "raises an assertion": "def f(x): raise AssertionError",
    "claims a builtin exception": "class SystemExit(Exception): pass\ndef f(x): raise SystemExit(0)",
    "answers for the other process": 'import os\nos.write(3, b\'{"value": 4, "arguments": []}\\n\' * 9)\n'
    "def f(x): return 5",
    "writes nonsense": "import os\nos.write(3, b'nonsense\\n' * 9)\ndef f(x): return 5",
    "writes an endless line": "import os\ntry:\n  while True: os.write(3, b'[' * 10**6)\nexcept OSError: pass",
    "closes the channel": "import os\nos.close(3)\ndef f(x): return 5",
    "returns a huge text": "def f(x): return 'x' * 10**8 * 2",
    "returns a deep list": "def f(x):\n  y = []\n  for _ in range(10**5): y = [y]\n  return y",
    "ends Python in a thread": "import threading, os\nthreading.Timer(0.01, os._exit, [0]).start()\ndef f(x): return 5",
    "has no such name": "",
    "is no program": "def f(",
}
CHECKS = [
    "assert f(2) == 4",
    "assert abs(f(2) - 4) < 1e-6",
    "import math\nassert math.isclose(f(2), 4)",
    "assert math.isclose(f(2), 4)",
    "assert all(map(lambda each: f(each) == 2 * each, [2]))",
    "for given in [2]:\n  assert f(given) in [4]",
]


@pytest.mark.parametrize("fake", FAKES)
def test_faking_the_verdict(fake):
    """The answer's process has a channel with plain data, and no other way to the tests."""
    reward = CodeReward(sandbox=SandboxOptions(bubblewrap="never", timeout_s=DEADLINE_S))
    sandbox()
    tests = [CodeTest(code=check) for check in CHECKS] + [CodeTest(stdin="2\n", stdout="4\n")]
    verdicts = asyncio.run(reward.verdicts(FAKES[fake], tests))
    assert "passed" not in verdicts, verdicts


def test_an_honest_answer_passes_the_same_checks():
    reward = CodeReward(sandbox=SandboxOptions(bubblewrap="never", timeout_s=DEADLINE_S))
    sandbox()
    verdicts = asyncio.run(reward.verdicts("def f(x): return 2 * x", [CodeTest(code=check) for check in CHECKS]))
    assert verdicts == ["passed"] * len(CHECKS)


def test_the_program_ends_with_its_client():
    """A client that is killed leaves neither server nor program."""
    size = 16 * MIB + 4
    sandbox()
    code = f"""
from cosmos_rl_llm.sandbox.sandbox import Sandbox, SandboxOptions
made = Sandbox(SandboxOptions(files_bytes={size}, timeout_s=1000, bubblewrap="never"))
made.started(), print("started", flush=True)
made.run_blocking("import time; time.sleep(1000)")
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as client:
        assert client.stdout is not None
        assert client.stdout.readline() == b"started\n"
        until(lambda: len(processes_with(f'"files_bytes":{size}')) == 3)  # server, watcher, program
        client.kill()
    until(lambda: processes_with(f'"files_bytes":{size}') == [])


def test_a_cancelled_run_ends_the_program():
    size = 16 * MIB + 5
    made = sandbox(files_bytes=size)

    async def cancel():
        run = asyncio.create_task(made.run("import time; time.sleep(1000)", timeout_s=1000))
        await asyncio.to_thread(until, lambda: len(processes_with(str(size))) == 3)
        run.cancel()
        await asyncio.gather(run, return_exceptions=True)

    asyncio.run(cancel())
    until(lambda: len(processes_with(str(size))) == 1)


def test_programs_at_the_same_time_do_not_see_one_another():
    program = "import os, time\nopen('mine', 'w').close()\ntime.sleep(0.2)\nprint(os.listdir('.'), os.getpid())"
    results = []
    threads = [threading.Thread(target=lambda: results.append(attack(program).stdout)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == ["['mine'] 1\n"] * 3

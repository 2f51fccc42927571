"""The tiny domain, with faults in its processes: a recipe's `domain = "faults:DOMAIN"`.

arm(run_dir, "before the vote", "policy-1")       this process dies at this point, once; `fired` is True afterwards
arm(run_dir, "in the forward pass", "policy-1", HANG)     it hangs there, with its heartbeats going on
arm(run_dir, "while it generates", "rollout-0", STOP)     it is stopped there, as by SIGSTOP
arm(run_dir, "before Grant is sent", CONTROLLER)          the controller dies
cut(run_dir) / mend(run_dir)                      no byte passes between policies, while connections stay open
"""

import contextlib
import functools
import inspect
import os
import re
import signal
import socket
import threading
import time
from pathlib import Path

from cosmos_rl_core.testing.tiny import Tiny

LEADER = "leader"
"""Instead of a name: the first of a mesh of several."""
CONTROLLER = "controller"
KILL, STOP, HANG = "SIGKILL", "SIGSTOP", "hang"
ADDRESS = re.compile(rb"\x02\x00(..)(\x7f\x00\x00\x01)", re.DOTALL)
"""A socket address of gloo's: IPv4, port, 127.0.0.1."""


def arm(run_dir, point, victim, fault=KILL):
    partial = run_dir / "fault.partial"
    partial.write_text(f"{point}\n{victim}\n{fault}")
    partial.rename(run_dir / "fault")


def fired(run_dir):
    return not (run_dir / "fault").exists()


def cut(run_dir):
    (run_dir / "cut").touch()


def mend(run_dir):
    (run_dir / "cut").unlink()


class Faulty(Tiny):
    def load_rows(self, data):
        if not is_worker():
            _plant_in_controller()
        return super().load_rows(data)

    def build_policy(self, model, **options):
        _plant_in_policy()
        return super().build_policy(model, **options)

    def build_engine(self, model, **options):
        _plant_in_rollout()
        return super().build_engine(model, **options)


DOMAIN = Faulty()


@functools.cache
def words_of_process():
    return Path("/proc/self/cmdline").read_text().split("\0")


def is_worker():
    return "--role" in words_of_process()


class _Mesh:
    mine = None
    """The PolicyMesh of this process."""


def strike(point, *, last_words=lambda: None):
    """Die, stop or hang here if this point is armed for this process."""
    fault = _run_dir() / "fault"
    try:
        armed, victim, kind = fault.read_text().split("\n")
    except FileNotFoundError:
        return
    if armed == point and _is_me(victim):
        try:
            fault.rename(_run_dir() / "fired")
        except FileNotFoundError:  # another thread of this process was faster
            return
        while kind == HANG:
            time.sleep(1.0)
        last_words()
        os.kill(os.getpid(), getattr(signal, kind))


def _is_me(victim):
    if victim == LEADER:
        return _Mesh.mine is not None and _Mesh.mine.leads and len(_Mesh.mine.members) > 1
    return not is_worker() if victim == CONTROLLER else victim in words_of_process()


def _run_dir():
    return Path(os.environ["FAULTS_OF"])


def at(point):
    """Return a hook of `_wrap` that strikes."""
    return lambda *args, **options: strike(point)


def _plant_in_policy():
    """Wrap the methods at the named points."""
    from cosmos_rl_core.checkpoint.saver import CheckpointSaver
    from cosmos_rl_core.control import protocol as p
    from cosmos_rl_core.train.learner import PolicyLearner
    from cosmos_rl_core.train.replicas import ReplicaGroup
    from cosmos_rl_core.train.trainer import Trainer
    from cosmos_rl_core.workers.mesh import ChannelStore, PolicyMesh
    from cosmos_rl_core.workers.steps import PolicyLink, PolicySteps
    from cosmos_rl_transfer.publish.server import Delivery

    def remember(mesh, /, *args, **options):
        _Mesh.mine = mesh

    def voted(link, message, /):
        if isinstance(message, p.Vote):
            strike("after the vote")

    def reducing(group, tensors, /):
        if (_run_dir() / "fault").exists():
            strike("in the reduce", last_words=lambda: group._group.allreduce([tensors[0].clone()]))

    def updated(trainer, /, *, last=True):
        if not last:
            strike("between updates")

    _wrap(PolicyMesh, "__init__", after=remember)
    _wrap(Trainer, "forward_backward", before=at("in the forward pass"))
    _wrap(ReplicaGroup, "sum", before=reducing)
    _wrap(PolicySteps, "commit", before=at("before the vote"))
    _wrap(PolicyLink, "send", after=voted)
    _wrap(PolicyLearner, "optim_step", before=at("after the commit"))
    _wrap(Trainer, "optim_step", after=updated)
    _wrap(ReplicaGroup, "receive", before=at("while it is healed"))
    _wrap(ReplicaGroup, "send", before=at("while it heals another"))
    _wrap(Delivery, "_serve", before=at("while it serves weights"))
    _wrap(CheckpointSaver, "_write", before=at("while it saves"))
    _wrap_get(ChannelStore)


def _plant_in_rollout():
    from cosmos_rl_core.rollout.worker import RolloutWorker
    from cosmos_rl_core.testing.tiny_model import TinyEngine
    from cosmos_rl_core.workers.client import RemoteLeases

    _wrap(TinyEngine, "_sample", before=at("while it generates"))
    _wrap(TinyEngine, "switch", before=at("before it switches weights"))
    _wrap(RemoteLeases, "deliver", before=at("before it delivers"), after=at("after it has delivered"))
    _wrap(RolloutWorker, "_begin_idle", after=at("while it is idle"))


def _plant_in_controller():
    """Before each kind of record is written, and before and after each kind of message of the ledger is sent."""
    from cosmos_rl_core.control.journal import Journal
    from cosmos_rl_core.control.server import Controller

    if Controller in _PLANTED:
        return
    _PLANTED.add(Controller)

    def writing(journal, record, /):
        strike(f"before {type(record).__name__} is written")

    def sending(controller, output, /):
        strike(f"before {type(getattr(output, 'message', output)).__name__} is sent")

    def sent(controller, output, /):
        strike(f"after {type(getattr(output, 'message', output)).__name__} is sent")

    _wrap(Journal, "append", before=writing)
    _wrap(Controller, "_dispatch", before=sending, after=sent)


_PLANTED = set()
"""Classes with faults in them: rows are loaded twice."""


def _wrap(owner, name, *, before=lambda *args, **options: None, after=lambda *args, **options: None):
    method = getattr(owner, name)

    @functools.wraps(method)
    def wrapped(*args, **options):
        before(*args, **options)
        result = method(*args, **options)
        if inspect.isawaitable(result):
            return awaited(result, *args, **options)
        after(*args, **options)
        return result

    async def awaited(result, *args, **options):
        found = await result
        after(*args, **options)
        return found

    setattr(owner, name, wrapped)


def _wrap_get(store):
    """Lead connections to other policies through proxies of this process."""
    get = store.get

    def through_proxy(self, key):
        return ADDRESS.sub(lambda found: b"\x02\x00" + _proxy(found[1]) + found[2], get(self, key), count=1)

    store.get = through_proxy


def _proxy(port):
    """Listen on a port, and pass what comes to `port`; both as two bytes."""
    listener = _listener_beside(int.from_bytes(port))

    def serve():
        while True:
            ours, _ = listener.accept()
            theirs = socket.create_connection(("127.0.0.1", int.from_bytes(port)))
            for source, sink in ((ours, theirs), (theirs, ours)):
                threading.Thread(target=_pass_on, args=(source, sink), daemon=True).start()

    threading.Thread(target=serve, daemon=True).start()
    return listener.getsockname()[1].to_bytes(2)


def _listener_beside(port):
    """Listen on a free port close to this one: of two addresses, gloo's greater one connects."""
    for near in range(port + 1, 1 << 16):
        with contextlib.suppress(OSError):  # in use
            return socket.create_server(("127.0.0.1", near))
    raise OSError(f"no free port above {port}")


def _pass_on(source, sink):
    stopped = _run_dir() / "cut"
    try:
        while data := source.recv(1 << 16):
            while stopped.exists():
                time.sleep(0.02)
            sink.sendall(data)
    except OSError:
        pass  # one side has closed: the other is closed below
    for end in (source, sink):
        with contextlib.suppress(OSError):  # it is closed
            end.shutdown(socket.SHUT_RDWR)

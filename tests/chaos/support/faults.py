"""The tiny domain, with faults in its policies: a recipe's `domain = "faults:DOMAIN"`.

arm(run_dir, "before the vote", "policy-1")       the policy dies at this point, once; `fired` is True afterwards
arm(run_dir, HANG, "policy-1")                    it hangs in its forward pass, with its heartbeats going on
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
HANG = "hang"
ADDRESS = re.compile(rb"\x02\x00(..)(\x7f\x00\x00\x01)", re.DOTALL)
"""A socket address of gloo's: IPv4, port, 127.0.0.1."""


def arm(run_dir, point, victim):
    partial = run_dir / "fault.partial"
    partial.write_text(f"{point}\n{victim}")
    partial.rename(run_dir / "fault")


def fired(run_dir):
    return not (run_dir / "fault").exists()


def cut(run_dir):
    (run_dir / "cut").touch()


def mend(run_dir):
    (run_dir / "cut").unlink()


class Faulty(Tiny):
    def build_policy(self, model, **options):
        _plant()
        return super().build_policy(model, **options)


DOMAIN = Faulty()


class _Policy:
    """This process."""

    mesh = None
    """Its PolicyMesh."""

    @classmethod
    def strike(cls, point, *, last_words=lambda: None):
        """Die or hang here if this point is armed for this process."""
        if cls.mesh is None:
            return
        run_dir = cls.run_dir()
        fault = run_dir / "fault"
        try:
            armed, victim = fault.read_text().split("\n")
        except FileNotFoundError:
            return
        leads = cls.mesh.leads and len(cls.mesh.members) > 1
        if armed == point and (leads if victim == LEADER else cls.mesh._context.name == victim):
            fault.rename(run_dir / "fired")
            while point == HANG:
                time.sleep(1.0)
            last_words()
            os.kill(os.getpid(), signal.SIGKILL)

    @classmethod
    def run_dir(cls):
        return Path(os.environ["FAULTS_OF"])


def _plant():
    """Wrap the methods at the named points."""
    from cosmos_rl_core.checkpoint.saver import CheckpointSaver
    from cosmos_rl_core.control import protocol as p
    from cosmos_rl_core.train.learner import PolicyLearner
    from cosmos_rl_core.train.replicas import ReplicaGroup
    from cosmos_rl_core.train.trainer import Trainer
    from cosmos_rl_core.workers.mesh import ChannelStore, PolicyMesh
    from cosmos_rl_core.workers.steps import DirectLink, PolicySteps
    from cosmos_rl_transfer.publish.delivery import Delivery

    def remember(mesh, /, *args, **options):
        _Policy.mesh = mesh

    def voted(link, message, /):
        if isinstance(message, p.Vote):
            _Policy.strike("after the vote")

    def reducing(group, tensors, /):
        if (_Policy.run_dir() / "fault").exists():
            _Policy.strike("in the reduce", last_words=lambda: group._group.allreduce([tensors[0].clone()]))

    def updated(trainer, /, *, last=True):
        if not last:
            _Policy.strike("between updates")

    def at(point):
        return lambda *args, **options: _Policy.strike(point)

    _wrap(PolicyMesh, "__init__", after=remember)
    _wrap(Trainer, "forward_backward", before=at("in the forward pass"))
    _wrap(Trainer, "forward_backward", before=at(HANG))
    _wrap(ReplicaGroup, "sum", before=reducing)
    _wrap(PolicySteps, "commit", before=at("before the vote"))
    _wrap(DirectLink, "send", after=voted)
    _wrap(PolicyLearner, "optim_step", before=at("after the commit"))
    _wrap(Trainer, "optim_step", after=updated)
    _wrap(ReplicaGroup, "receive", before=at("while it is healed"))
    _wrap(ReplicaGroup, "send", before=at("while it heals another"))
    _wrap(Delivery, "_serve", before=at("while it serves weights"))
    _wrap(CheckpointSaver, "_write", before=at("while it saves"))
    _wrap_get(ChannelStore)


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
    stopped = _Policy.run_dir() / "cut"
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

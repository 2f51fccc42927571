"""The policy replicas that train together, as a rank of one of them sees them.

    Remesh(epoch, members) -> connect rank i with rank i of the other members -> whoever is behind takes weights and
    optimizer state from the first member that is not -> the next batch is requested in the new epoch

A new mesh is made whenever a replica joins or is lost; the groups of the old one are left to end by themselves.
"""

from __future__ import annotations

import hashlib
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from functools import partial

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from cosmos_rl_core.checkpoint.contents import OPTIMIZER, RNG
from cosmos_rl_core.checkpoint.restore import live_tensors, parameter_names
from cosmos_rl_core.control import protocol as p
from cosmos_rl_core.control.rendezvous import STORE
from cosmos_rl_core.errors import EpochOver, WorkerFailed
from cosmos_rl_core.parallel.dtensor import local_part
from cosmos_rl_core.parallel.mesh import ReplicaMesh
from cosmos_rl_core.parallel.rank_group import RankGroup
from cosmos_rl_core.train.replicas import ReplicaGroup, Waiting
from cosmos_rl_core.train.trainer import Trainer
from cosmos_rl_core.wire.blocking import BlockingConnection
from cosmos_rl_core.wire.channel import ConnectionClosed, Hello
from cosmos_rl_core.wire.listening import parse_address
from cosmos_rl_core.workers.context import WorkerContext

ASK_S = 0.005
"""Seconds between two reads of a key that is not set yet."""
AGAIN_S = 0.1
"""Seconds between two attempts to reach the controller."""
CONNECT_S = 30.0


class PolicyMesh:
    """One rank's place among the policy replicas. `join` runs in the compute thread of every rank."""

    def __init__(
        self,
        context: WorkerContext,
        *,
        controller: Callable[[], str],
        trainer: Trainer,
        mesh: ReplicaMesh | None,
        is_over: Callable[[int], bool],
        waiting: Waiting | None = None,
        timeout_s: float,
        peer_s: float = CONNECT_S,
        leads_first: bool = True,
    ) -> None:
        """controller: returns the controller's address. is_over: whether a later epoch than the given one is known
        here. waiting: updated during waits for other replicas. peer_s: maximum time to connect to one that is there.
        leads_first: `leads` without a mesh."""
        self.members: tuple[str, ...] = ()
        self.group: ReplicaGroup | None = None
        self._context, self._replica, self._trainer = context, context.replica, trainer
        self._controller = controller
        self._device = torch.device("cpu") if mesh is None else mesh.device
        self._ranks = RankGroup() if mesh is None else RankGroup.of_all()
        self._is_over, self._timeout_s, self._peer_s = is_over, timeout_s, peer_s
        self._waiting = waiting or Waiting()
        self._leads_first = leads_first

    @property
    def leads(self) -> bool:
        """Whether this replica writes the run's files: it is the oldest of the mesh."""
        return self.members[0] == self._replica if self.members else self._leads_first

    @property
    def place(self) -> int:
        return self.members.index(self._replica) if self.members else 0

    @property
    def count(self) -> int:
        return max(1, len(self.members))

    def join(self, message: p.Remesh) -> bool:
        """Join the mesh; return whether weights were taken from another replica. Raises EpochOver."""
        self.members, self.group = message.members, None
        if len(message.members) == 1:
            return False
        is_over = partial(self._is_over, message.epoch)
        store = ChannelStore(self._connect, epoch=message.epoch, is_over=is_over, timeout_s=self._timeout_s)
        try:
            self.group = ReplicaGroup(
                dist.PrefixStore(str(self._ranks.rank), store),
                place=self.place,
                count=self.count,
                device=self._device,
                is_over=is_over,
                agree=self._ranks.gather,
                waiting=self._waiting,
                address=self._context.address,
                timeout_s=self._timeout_s,
                peer_s=self._peer_s,
            )
        finally:
            store.close()
        return self._catch_up(self.group, version=message.version)

    def _connect(self) -> BlockingConnection:
        context = self._context
        address = parse_address(self._controller())
        found = socket.create_connection((address.host, address.port), timeout=CONNECT_S)
        connection = BlockingConnection(found, decode=p.ToWorker)
        hello = Hello(name=f"{self._replica}.{self._ranks.rank}", role=STORE)
        deadline = time.monotonic() + CONNECT_S
        connection.open(context.token, hello=hello, client=True, deadline=deadline, tls=context.tls)
        found.settimeout(CONNECT_S)
        return connection

    def _catch_up(self, group: ReplicaGroup, *, version: int) -> bool:
        """Give the replicas that are behind the state of the first one that is not."""
        versions = [int(found) for found in group.gather(b"%d" % self._trainer.version)]
        current = [place for place, found in enumerate(versions) if found == version]
        if not current:
            raise WorkerFailed(f"no policy replica has the weights of step {version}: {versions}")
        behind = [place for place, found in enumerate(versions) if found != version]
        if group.place == current[0]:
            for place in behind:
                send_state(group, self._trainer, to=place)
        if group.place not in behind:
            return False
        receive_state(group, self._trainer, source=current[0])
        self._trainer.version = version
        return True


class ChannelStore(dist.Store):
    """torch's key-value store over a connection to the controller, for one epoch."""

    def __init__(
        self, connect: Callable[[], BlockingConnection], *, epoch: int, is_over: Callable[[], bool], timeout_s: float
    ) -> None:
        """connect: called with the first use of the store."""
        super().__init__()
        self._connect, self._epoch = connect, epoch
        self._is_over, self._timeout_s = is_over, timeout_s
        self._connection: BlockingConnection | None = None
        self._sent: list[p.StoreSet] = []
        """Keys that are set again on another connection."""
        self._lock = threading.Lock()

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()

    def set(self, key: str, value: str | bytes | Sequence[int]) -> None:
        data = value.encode() if isinstance(value, str) else bytes(value)
        self._ask(p.StoreSet(self._epoch, key, data))

    def get(self, key: str) -> bytes:
        deadline = time.monotonic() + self._timeout_s
        while (value := self._ask(p.StoreGet(self._epoch, key)).value) is None:
            if time.monotonic() > deadline:
                raise EpochOver(f"{key} was not set within {self._timeout_s:g} s")
            time.sleep(ASK_S)
        return value

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        for key in keys:
            self.get(key)

    def check(self, keys: Sequence[str]) -> bool:
        return all(self._ask(p.StoreGet(self._epoch, key)).value is not None for key in keys)

    def _ask(self, message: p.StoreSet | p.StoreGet) -> p.StoreValue:
        with self._lock:
            answer = self._answer(message)
        if answer.over or self._is_over():
            raise EpochOver("a later mesh was formed")
        return answer

    def _answer(self, message: p.StoreSet | p.StoreGet) -> p.StoreValue:
        deadline = time.monotonic() + self._timeout_s
        while True:
            try:
                return self._ask_once(message)
            except (OSError, ConnectionClosed) as error:  # the controller may return, with an empty store
                self.close()
                self._connection = None
                if self._is_over() or time.monotonic() > deadline:
                    raise EpochOver(f"the controller is gone: {error}") from error
                time.sleep(AGAIN_S)

    def _ask_once(self, message: p.StoreSet | p.StoreGet) -> p.StoreValue:
        if self._connection is None:
            self._connection = self._connect()
            for earlier in self._sent:
                self._connection.send(earlier)
                self._connection.receive()
        if isinstance(message, p.StoreSet) and message not in self._sent:
            self._sent.append(message)
        self._connection.send(message)
        return self._connection.receive()


class Entry(msgspec.Struct, array_like=True):
    """One tensor of a replica's state: this rank's part."""

    name: str
    dtype: str
    shape: tuple[int, ...]


def send_state(group: ReplicaGroup, trainer: Trainer, *, to: int) -> None:
    """Send this rank's weights and optimizer state, with a digest, to the same rank of another replica."""
    parts = {name: local_part(tensor).contiguous() for name, tensor in _state(trainer).items()}
    entries = [Entry(name, str(part.dtype).removeprefix("torch."), tuple(part.shape)) for name, part in parts.items()]
    group.send_bytes(msgspec.msgpack.encode(entries), to=to)
    group.send(list(parts.values()), to=to)
    group.send_bytes(_digest(parts.values()), to=to)


def receive_state(group: ReplicaGroup, trainer: Trainer, *, source: int) -> None:
    """Take the state that the same rank of another replica sends. Raises WorkerFailed if it is of another layout."""
    entries = msgspec.msgpack.decode(group.receive_bytes(source=source), type=list[Entry])
    live = _with_optimizer_state(trainer, entries)
    parts = [local_part(live[entry.name]) for entry in entries]
    for entry, part in zip(entries, parts):
        if tuple(part.shape) != entry.shape:
            raise WorkerFailed(
                f"{entry.name} is {list(entry.shape)} in the other policy replica and {list(part.shape)} here: "
                "replicas need the same model and [policy.parallel]"
            )
    received = [part if part.is_contiguous() else torch.empty_like(part).contiguous() for part in parts]
    group.receive(received, source=source)
    for part, data in zip(parts, received):
        if part is not data:
            part.copy_(data)
    if group.receive_bytes(source=source) != _digest(received):
        raise WorkerFailed("the state of the other policy replica was damaged on its way")


def _state(trainer: Trainer) -> dict[str, Tensor]:
    """Everything that a checkpoint holds but random states, in an order that all replicas share."""
    tensors = live_tensors(trainer.policy, trainer.optimizer)
    return {name: tensors[name] for name in sorted(tensors) if not name.startswith(RNG)}


def _with_optimizer_state(trainer: Trainer, entries: Sequence[Entry]) -> Mapping[str, Tensor]:
    """The live tensors by name, with optimizer state made where this replica has none yet. Raises WorkerFailed."""
    optimizer = trainer.optimizer
    parameters = parameter_names(trainer.policy, optimizer)
    for parameter in parameters.values():
        optimizer.state.pop(parameter, None)
    for entry in entries:
        if not entry.name.startswith(OPTIMIZER):
            continue
        name, _, key = entry.name.removeprefix(OPTIMIZER).rpartition("/")
        if (parameter := parameters.get(name)) is None:
            raise WorkerFailed(f"{name} is trained in another policy replica and not here: replicas need one recipe")
        optimizer.state[parameter][key] = _like(parameter, entry)
    live = _state(trainer)
    if missing := sorted({entry.name for entry in entries} ^ set(live)):
        raise WorkerFailed(f"{missing[0]} is in one of two policy replicas alone: replicas need the same recipe")
    return live


def _like(parameter: Tensor, entry: Entry) -> Tensor:
    """Optimizer state: sharded as its parameter where it has the parameter's shape, whole otherwise."""
    part, dtype = local_part(parameter), getattr(torch, entry.dtype)
    if tuple(part.shape) == entry.shape:
        return torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
    return torch.zeros(entry.shape, dtype=dtype, device=part.device)


def _digest(parts: Iterable[Tensor]) -> bytes:
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        digest.update(part.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.digest()

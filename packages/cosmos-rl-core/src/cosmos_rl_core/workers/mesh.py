"""The policy replicas that train together, as a rank of one of them sees them.

    Remesh(epoch, members) -> connect rank i with rank i of the other members -> exchange outlines
    -> a replica whose model, layout or frozen weights differ from those of the first one with the newest step leaves
    -> a replica that is behind takes weights and optimizer state from that one
    -> the next batch is requested in the new epoch

A new mesh is made whenever a replica joins or is lost. The group of the old one is aborted where it can be (NCCL), and
its store is closed afterwards: torch reads a group's store as long as the group is there.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from datetime import timedelta
from functools import partial

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor, nn

from cosmos_rl_core.checkpoint.contents import OPTIMIZER, RNG
from cosmos_rl_core.checkpoint.restore import live_tensors, parameter_names
from cosmos_rl_core.control import protocol as p
from cosmos_rl_core.control.rendezvous import STORE
from cosmos_rl_core.errors import EpochOver, WorkerFailed
from cosmos_rl_core.interfaces import Reference, Teacher
from cosmos_rl_core.parallel.dtensor import local_part
from cosmos_rl_core.parallel.rank_group import RankGroup
from cosmos_rl_core.train.byte_sums import digest
from cosmos_rl_core.train.replicas import MeshPlace, RankWaits, ReplicaGroup, WaitLimits
from cosmos_rl_core.train.trainer import Trainer
from cosmos_rl_core.wire.blocking import BlockingConnection
from cosmos_rl_core.wire.channel import ConnectionClosed, Hello
from cosmos_rl_core.wire.listening import parse_address
from cosmos_rl_core.workers.context import WorkerContext
from cosmos_rl_core.workers.failure import RefusedByController

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
        is_over: Callable[[int], bool],
        limits: WaitLimits,
        waiting: RankWaits | None = None,
        leads_first: bool = True,
        models: Mapping[str, Reference | Teacher] = {},
    ) -> None:
        """controller: returns the controller's address. is_over: whether a later epoch than the given one is known
        here. waiting: updated during waits for other replicas.
        leads_first: `leads` without a mesh. models: what it computes with, by name; what is not trained in them must be
        the same in all replicas."""
        self.members: tuple[str, ...] = ()
        self.group: ReplicaGroup | None = None
        self._store: ChannelStore | None = None
        """That of the group."""
        self._context, self._replica, self._trainer = context, context.replica, trainer
        self._controller = controller
        self._device = torch.device("cpu") if trainer.mesh is None else trainer.mesh.device
        self._ranks = RankGroup() if trainer.mesh is None else RankGroup.of_all()
        self._is_over, self._limits = is_over, limits
        self._waiting = waiting or RankWaits()
        self._leads_first = leads_first
        self._models = models
        self._frozen: dict[str, bytes] | None = None
        """Digests of what is not trained in each of the models."""
        self._has_trained = False
        """Whether its state is that of the mesh: it has joined one."""

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
        """Join the mesh; return whether weights were taken from another replica.

        Raises EpochOver, and RefusedByController if this replica cannot train with the others.
        """
        self.leave()
        earlier, self.members = self.members, message.members
        if len(message.members) == 1:
            self._has_trained = True
            return False
        is_over = partial(self._is_over, message.epoch)
        newcomers = [place for place, name in enumerate(self.members) if earlier and name not in earlier]
        store = ChannelStore(self._connect, epoch=message.epoch, is_over=is_over, timeout_s=self._limits.timeout_s)
        with ExitStack() as on_error:
            on_error.callback(store.close)
            self.group = ReplicaGroup(
                dist.PrefixStore(str(self._ranks.rank), store),
                MeshPlace(self.place, self.count, newcomers),
                device=self._device,
                is_over=is_over,
                agree=self._ranks.gather,
                waiting=self._waiting,
                address=self._context.address,
                limits=self._limits,
            )
            self._store = store
            on_error.pop_all()
        behind = self._catch_up(self.group, version=message.version)
        self._has_trained = True
        return behind

    def leave(self) -> None:
        """End this rank's group, if there is one, and then close its store."""
        group, store, self.group, self._store = self.group, self._store, None, None
        if group is not None and store is not None:
            group.end(store.close)

    def _connect(self) -> BlockingConnection:
        context = self._context
        address = parse_address(self._controller())
        sock = socket.create_connection((address.host, address.port), timeout=CONNECT_S)
        connection = BlockingConnection(sock, decode=p.ToWorker)
        hello = Hello(name=f"{self._replica}.{self._ranks.rank}", role=STORE)
        deadline = time.monotonic() + CONNECT_S
        connection.open(context.token, hello=hello, client=True, deadline=deadline, tls=context.tls)
        sock.settimeout(CONNECT_S)
        return connection

    def _catch_up(self, group: ReplicaGroup, *, version: int) -> bool:
        """Give the replicas that are behind the state of the first one that is not."""
        encoded = msgspec.msgpack.encode(self._outline(version))
        outlines = [msgspec.msgpack.decode(each, type=Outline) for each in group.gather(encoded)]
        current = [place for place, outline in enumerate(outlines) if outline.version == version]
        if not current:
            versions = [outline.version for outline in outlines]
            raise WorkerFailed(f"no policy replica has the weights of step {version}: {versions}")
        source = next((place for place in current if not outlines[place].state), current[0])
        behind = self._compared(outlines, source=source, version=version)
        if not behind:
            return False
        if group.place == source:
            send_state(group, self._trainer, to=behind)
        elif group.place in behind:
            receive_state(group, self._trainer, outlines[source].entries, source=source)
            self._trainer.version = version
            self._trainer.objective.state = outlines[source].objective
        else:
            group.wait_for(source)
        return group.place in behind

    def _outline(self, version: int) -> Outline:
        state, trainer = _state(self._trainer), self._trainer
        if self._frozen is None:
            self._frozen = {name: _frozen_digest(model, state, self._device) for name, model in self._models.items()}
        compares = not self._has_trained and trainer.version == version
        return Outline(
            version=trainer.version,
            entries=[StateTensor.of(name, tensor) for name, tensor in state.items()],
            trained=sorted(parameter_names(trainer.policy, trainer.optimizer)),
            frozen=self._frozen,
            state=digest(map(local_part, state.values()), self._device) if compares else b"",
            objective=trainer.objective.state,
        )

    def _compared(self, outlines: Sequence[Outline], *, source: int, version: int) -> list[int]:
        """Return the places of the replicas that must take the state of the one at `source`.

        Raises RefusedByController if this one cannot, EpochOver if another one cannot.
        """
        ranks = self._ranks.gather(msgspec.msgpack.encode(_differences(outlines, source=source, version=version)))
        differences = [msgspec.msgpack.decode(each, type=tuple[list[int], dict[int, str]]) for each in ranks]
        unlike = {place: text for _, texts in differences for place, text in texts.items()}
        if text := unlike.get(self.place):
            raise RefusedByController(f"cannot train with {self.members[source]}: {text}")
        if unlike:
            names = ", ".join(self.members[place] for place in sorted(unlike))
            raise EpochOver(f"{names} cannot train with {self._replica}")
        return sorted({place for places, _ in differences for place in places})


class ChannelStore(dist.Store):
    """torch's key-value store over one connection to the controller, for one epoch. Any thread may use it."""

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
        self._closed = False

    def close(self) -> None:
        """End the connection. Later calls, and one that waits, raise EpochOver."""
        self._closed = True
        self._disconnect()

    def _disconnect(self) -> None:
        if (connection := self._connection) is not None:
            connection.close()

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
        while not self._closed:
            try:
                return self._ask_once(message)
            except (OSError, ConnectionClosed) as error:  # the controller may return, with an empty store
                self._disconnect()
                self._connection = None
                if self._is_over() or time.monotonic() > deadline:
                    raise EpochOver(f"the controller is gone: {error}") from error
                time.sleep(AGAIN_S)
        raise EpochOver("this replica has left the mesh")

    def _ask_once(self, message: p.StoreSet | p.StoreGet) -> p.StoreValue:
        if self._connection is None:
            self._connection = self._connect()
            if self._closed:
                raise ConnectionClosed("closed meanwhile")
            for earlier in self._sent:
                self._connection.send(earlier)
                self._connection.receive()
        if isinstance(message, p.StoreSet) and message not in self._sent:
            self._sent.append(message)
        self._connection.send(message)
        return self._connection.receive()


class StateTensor(msgspec.Struct, frozen=True, array_like=True):
    """One tensor of a replica's state: this rank's part."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}"

    @classmethod
    def of(cls, name: str, tensor: Tensor) -> StateTensor:
        part = local_part(tensor)
        return cls(name, str(part.dtype).removeprefix("torch."), tuple(part.shape))


class Outline(msgspec.Struct, array_like=True):
    """Description of a rank of a replica, exchanged before state is sent."""

    version: int
    entries: list[StateTensor]
    """Of its state; without those of the optimizer before the first step."""
    trained: list[str]
    """Names of the parameters that it trains."""
    frozen: dict[str, bytes]
    """Digests of what it does not train."""
    state: bytes = b""
    """Digest of its state, if it has the version and was in no mesh yet."""
    objective: tuple[float, ...] = ()
    """`Objective.state`."""

    @property
    def weights(self) -> dict[str, StateTensor]:
        return {entry.name: entry for entry in self.entries if not entry.name.startswith(OPTIMIZER)}


def _differences(outlines: Sequence[Outline], *, source: int, version: int) -> tuple[list[int], dict[int, str]]:
    """Return the places that are behind `source`, and the first difference of each place that cannot train with it."""
    of_source = outlines[source]
    behind = [
        place
        for place, outline in enumerate(outlines)
        if place != source and (outline.version != version or outline.state not in (b"", of_source.state))
    ]
    texts = {place: first_difference(outline, of_source) for place, outline in enumerate(outlines) if place != source}
    return behind, {place: text for place, text in texts.items() if text}


def first_difference(mine: Outline, other: Outline) -> str:
    """Name the first difference for which a replica cannot train with another one; empty if there is none."""
    remedy = "start it with the same model, versions of packages and [policy.parallel]"
    weights, others = mine.weights, other.weights
    if missing := sorted(weights.keys() ^ others.keys()):
        where = "here" if missing[0] in weights else "there"
        return f"{missing[0]} is only {where}; {remedy}"
    for name, entry in weights.items():
        if entry != (other_entry := others[name]):
            return f"{name} is {entry} here and {other_entry} there; {remedy}"
    if missing := sorted(set(mine.trained) ^ set(other.trained)):
        where = "here" if missing[0] in mine.trained else "there"
        return f"{missing[0]} is trained only {where}; {remedy}"
    for name in sorted(mine.frozen.keys() | other.frozen.keys()):
        if mine.frozen.get(name) != other.frozen.get(name):
            return f"the frozen weights of its {name} have other values; start it with the same files of the model"
    return ""


def _frozen_digest(model: Reference | Teacher, state: Mapping[str, Tensor], device: torch.device) -> bytes:
    """The digest of the parameters of a model that are not part of the state; buffers may differ between replicas."""
    ours = {local_part(tensor).untyped_storage().data_ptr() for tensor in state.values()}
    unique = {id(tensor): tensor for tensor in model.tensors() if isinstance(tensor, nn.Parameter)}
    parts = [local_part(tensor) for tensor in unique.values()]
    return digest((part for part in parts if part.untyped_storage().data_ptr() not in ours), device)


def send_state(group: ReplicaGroup, trainer: Trainer, *, to: Sequence[int]) -> None:
    """Send this rank's weights and optimizer state to the same rank of other replicas."""
    group.send([local_part(tensor).contiguous() for tensor in _state(trainer).values()], to=to)


def receive_state(group: ReplicaGroup, trainer: Trainer, entries: Sequence[StateTensor], *, source: int) -> None:
    """Take the state that the same rank of another replica sends."""
    live = _with_optimizer_state(trainer, entries)
    parts = [local_part(live[entry.name]) for entry in entries]
    received = [part if part.is_contiguous() else torch.empty_like(part).contiguous() for part in parts]
    group.receive(received, source=source)
    for part, data in zip(parts, received):
        if part is not data:
            part.copy_(data)


def _state(trainer: Trainer) -> dict[str, Tensor]:
    """Everything that a checkpoint holds but random states, in an order that all replicas share."""
    tensors = live_tensors(trainer.policy, trainer.optimizer)
    return {name: tensors[name] for name in sorted(tensors) if not name.startswith(RNG)}


def _with_optimizer_state(trainer: Trainer, entries: Sequence[StateTensor]) -> Mapping[str, Tensor]:
    """The live tensors by name, with optimizer state like that of the other replica."""
    optimizer = trainer.optimizer
    parameters = parameter_names(trainer.policy, optimizer)
    for parameter in parameters.values():
        optimizer.state.pop(parameter, None)
    for entry in entries:
        if not entry.name.startswith(OPTIMIZER):
            continue
        name, _, key = entry.name.removeprefix(OPTIMIZER).rpartition("/")
        parameter = parameters[name]
        optimizer.state[parameter][key] = _like(parameter, entry)
    return _state(trainer)


def _like(parameter: Tensor, entry: StateTensor) -> Tensor:
    """Optimizer state: sharded as its parameter where it has the parameter's shape, whole otherwise."""
    part, dtype = local_part(parameter), getattr(torch, entry.dtype)
    if tuple(part.shape) == entry.shape:
        return torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
    return torch.zeros(entry.shape, dtype=dtype, device=part.device)

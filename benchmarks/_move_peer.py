"""Raw ways to move bytes between two processes of this machine, for transfer_move.py to stand beside.

    python _move_peer.py socket PORT NUM_BYTES     receives with recv_into
    python _move_peer.py gloo PORT NUM_BYTES       receives with torch.distributed
    python _move_peer.py nixl_source 0 NUM_BYTES   lets NIXL read its memory
    python _move_peer.py nixl_reader 0 NUM_BYTES   reads it with NIXL

The first two answer a line when they are ready and after every reception.
"""

from __future__ import annotations

import base64
import logging
import os
import socket
import subprocess
import sys
import time
from typing import Any

import numpy as np

CHUNK = 4 << 20
"""Bytes of one recv_into at most."""


class Peer:
    """A process that receives `num_bytes` again and again."""

    def __init__(self, kind: str, port: int, num_bytes: int, **environment: str) -> None:
        command = [sys.executable, __file__, kind, str(port), str(num_bytes)]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, env={**os.environ, **environment})

    def wait(self) -> bytes:
        """Return its next line. Raises RuntimeError if the process ended instead."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the peer ended with code {self._process.wait()}")
        return line.strip()

    def tell(self, line: bytes) -> None:
        """Write a line to it."""
        assert self._process.stdin is not None
        self._process.stdin.write(line + b"\n")
        self._process.stdin.flush()

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()


class RawSocket:
    """One TCP stream over loopback: sendall here, recv_into there, nothing else."""

    def __init__(self, num_bytes: int) -> None:
        self._data = np.ones(num_bytes, np.uint8)
        with socket.create_server(("127.0.0.1", 0)) as server:
            self._peer = Peer("socket", server.getsockname()[1], num_bytes)
            self._socket, _ = server.accept()
        self._peer.wait()

    def seconds(self) -> float:
        """Send everything once, until the other side has it."""
        started = time.perf_counter()
        self._socket.sendall(self._data)
        self._peer.wait()
        return time.perf_counter() - started

    def close(self) -> None:
        """End both sides."""
        self._socket.close()
        self._peer.close()


class Gloo:
    """torch.distributed's send and recv of one tensor."""

    def __init__(self, num_bytes: int) -> None:
        import torch
        import torch.distributed as dist

        store = dist.TCPStore("127.0.0.1", 0, 2, is_master=True, wait_for_workers=False)
        self._peer = Peer("gloo", store.port, num_bytes)
        dist.init_process_group("gloo", store=store, rank=0, world_size=2)
        self._data = torch.ones(num_bytes, dtype=torch.uint8)
        self._send = dist.send
        self._leave = dist.destroy_process_group
        self._peer.wait()

    def seconds(self) -> float:
        """Send everything once, until the other side has it."""
        started = time.perf_counter()
        self._send(self._data, 1)
        self._peer.wait()
        return time.perf_counter() - started

    def close(self) -> None:
        """End both sides."""
        self._peer.close()
        self._leave()


class NixlTcp:
    """A NIXL READ of one block between two other processes, for which UCX may use nothing but TCP."""

    def __init__(self, num_bytes: int) -> None:
        self._source = Peer("nixl_source", 0, num_bytes, UCX_TLS="tcp")
        self._reader = Peer("nixl_reader", 0, num_bytes, UCX_TLS="tcp")
        self._reader.tell(self._source.wait())

    def seconds(self) -> float:
        """Read everything once."""
        self._reader.tell(b"")
        return float(self._reader.wait())

    def close(self) -> None:
        """End both."""
        self._reader.close()
        self._source.close()


def _receive_from_socket(port: int, num_bytes: int) -> None:
    received = memoryview(np.zeros(num_bytes, np.uint8))
    with socket.create_connection(("127.0.0.1", port)) as connection:
        print(flush=True)
        while True:
            done = 0
            while done < num_bytes:
                count = connection.recv_into(received[done : done + CHUNK])
                if not count:
                    return
                done += count
            print(flush=True)


def _receive_from_gloo(port: int, num_bytes: int) -> None:
    import torch
    import torch.distributed as dist

    store = dist.TCPStore("127.0.0.1", port, 2, is_master=False)
    dist.init_process_group("gloo", store=store, rank=1, world_size=2)
    received = torch.zeros(num_bytes, dtype=torch.uint8)
    print(flush=True)
    while True:
        dist.recv(received, 0)
        print(flush=True)


def _nixl_agent(name: str, num_bytes: int) -> tuple[Any, np.ndarray]:
    """Return an agent and the memory it has registered."""
    logging.disable()  # NIXL's wrapper logs to standard output, which is ours
    from nixl_cu12._api import nixl_agent, nixl_agent_config

    agent = nixl_agent(name, nixl_agent_config(backends=["UCX"]))
    memory = np.ones(num_bytes, np.uint8)
    agent.register_memory([(memory.ctypes.data, num_bytes, 0, "")], "DRAM")
    return agent, memory


def _be_read_by_nixl(_: int, num_bytes: int) -> None:
    agent, memory = _nixl_agent("source", num_bytes)
    metadata = base64.b64encode(agent.get_agent_metadata())
    print(memory.ctypes.data, metadata.decode(), flush=True)
    sys.stdin.read()


def _read_with_nixl(_: int, num_bytes: int) -> None:
    agent, memory = _nixl_agent("reader", num_bytes)
    address, metadata = sys.stdin.readline().split()
    source = agent.add_remote_agent(base64.b64decode(metadata))
    there = agent.get_xfer_descs([(int(address), num_bytes, 0)], "DRAM")
    here = agent.get_xfer_descs([(memory.ctypes.data, num_bytes, 0)], "DRAM")
    while sys.stdin.readline():
        started = time.perf_counter()
        handle = agent.initialize_xfer("READ", here, there, source)
        state = agent.transfer(handle)
        while state == "PROC":
            time.sleep(1e-4)
            state = agent.check_xfer_state(handle)
        if state != "DONE":
            raise RuntimeError(f"NIXL says {state}")
        print(time.perf_counter() - started, flush=True)
        agent.release_xfer_handle(handle)


if __name__ == "__main__":
    play = {
        "socket": _receive_from_socket,
        "gloo": _receive_from_gloo,
        "nixl_source": _be_read_by_nixl,
        "nixl_reader": _read_with_nixl,
    }[sys.argv[1]]
    play(int(sys.argv[2]), int(sys.argv[3]))

"""Raw ways to move bytes between two processes of this machine, the baselines of transfer_move.py.

    python _move_peer.py socket PORT NUM_BYTES     receives with recv_into
    python _move_peer.py gloo PORT NUM_BYTES       receives with torch.distributed

Each prints a line when it is ready and after every reception.
"""

from __future__ import annotations

import socket
import subprocess
import sys
import time

import numpy as np

CHUNK = 4 << 20
"""Bytes of one recv_into at most."""


class Peer:
    """A process that receives `num_bytes` again and again."""

    def __init__(self, kind: str, port: int, num_bytes: int) -> None:
        command = [sys.executable, __file__, kind, str(port), str(num_bytes)]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE)

    def wait(self) -> None:
        """Wait for its next line. Raises RuntimeError if the process ended instead."""
        assert self._process.stdout is not None
        if not self._process.stdout.readline():
            raise RuntimeError(f"the peer ended with code {self._process.wait()}")

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()


class RawSocket:
    """One TCP stream over loopback: sendall here, recv_into there."""

    def __init__(self, num_bytes: int) -> None:
        self._data = np.ones(num_bytes, np.uint8)
        with socket.create_server(("127.0.0.1", 0)) as server:
            self._peer = Peer("socket", server.getsockname()[1], num_bytes)
            self._socket, _ = server.accept()
        self._peer.wait()

    def seconds(self) -> float:
        """Send all bytes once and wait for the receipt."""
        started = time.perf_counter()
        self._socket.sendall(self._data.data)
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
        """Send all bytes once and wait for the receipt."""
        started = time.perf_counter()
        self._send(self._data, 1)
        self._peer.wait()
        return time.perf_counter() - started

    def close(self) -> None:
        """End both sides."""
        self._peer.close()
        self._leave()


def _receive_from_socket(port: int, num_bytes: int) -> None:
    received = np.zeros(num_bytes, np.uint8).data
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


if __name__ == "__main__":
    receive = {"socket": _receive_from_socket, "gloo": _receive_from_gloo}[sys.argv[1]]
    receive(int(sys.argv[2]), int(sys.argv[3]))

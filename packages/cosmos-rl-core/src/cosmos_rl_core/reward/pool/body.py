"""The body of a request to a reward, in memory that its worker maps."""

from __future__ import annotations

import mmap
import os
import zlib

from cosmos_rl_core.processes import unnamed_memory


class BodySpool:
    """A body that is written as it arrives.

        spool = BodySpool()
        spool.write(chunk) ...                  # once for each piece of the body
        spool.crc, spool.num_bytes
        socket.send_fds(sock, [frame], [spool.descriptor])
        spool.close()

    A worker maps the descriptor: a body of gigabytes is never copied between processes, and survives a worker's death.
    """

    def __init__(self) -> None:
        self.num_bytes = 0
        self.crc = 0
        """CRC-32 of the written bytes; detects different bodies with the same request id."""
        self._descriptor = unnamed_memory()

    @property
    def descriptor(self) -> int:
        assert self._descriptor >= 0, "the spool is closed"
        return self._descriptor

    def write(self, chunk: bytes) -> None:
        """Append."""
        left = memoryview(chunk)
        while left:
            left = left[os.write(self.descriptor, left) :]
        self.crc = zlib.crc32(chunk, self.crc)
        self.num_bytes += len(chunk)

    def map(self) -> mmap.mmap:
        """Return the bytes. Raises ValueError for an empty body."""
        return mmap.mmap(self.descriptor, self.num_bytes, access=mmap.ACCESS_READ)

    def close(self) -> None:
        """Release the bytes; workers keep their mappings."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

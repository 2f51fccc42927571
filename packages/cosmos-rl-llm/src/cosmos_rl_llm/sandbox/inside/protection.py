"""The layers between a program and the machine: namespaces, mounts, Landlock, the filter of system calls, limits.

protection = Protection(layers, folders)       # tries each layer in a process of its own
protection.separate(files_bytes)               # in the watcher: namespaces and mounts, for its next child
protection.enter(request)                      # in that child: everything else; there is no way back
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import resource
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from . import seccomp

LAYERS = ("namespaces", "mounts", "landlock", "seccomp")
NOBODY = 65534
_SCRATCH = ("/tmp", "/var/tmp", "/dev/shm", "/mnt")
"""The folders that may become the program's own."""
_SYSTEM = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/etc/ld.so.cache", "/usr/share/zoneinfo")
_DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
_NAMESPACES = 0x10000000 | 0x20000000 | 0x40000000 | 0x08000000 | 0x04000000 | 0x00020000
"""User, processes, network, IPC, host name, mounts."""
_READ, _WRITE = 1 << 2 | 1 << 3, 1 << 1
"""Landlock's rights to read files and folders, and to write files."""
_RIGHTS = {1: 0x1FFF, 2: 0x3FFF, 3: 0x7FFF, 5: 0xFFFF}
"""All rights to files, by the first version of Landlock that has them."""
_SCRATCH_RIGHTS = 0x7FFF & ~(1 | 1 << 6 | 1 << 11)
"""All rights but to run files and to make devices."""
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF, _MOUNT_SETATTR = 444, 445, 446, 442
_SET_DEATH_SIGNAL, _SET_DUMPABLE, _NO_NEW_PRIVILEGES, _KILL = 1, 4, 38, 9
_THREADS, _DESCRIPTORS = 64, 64
_FIRST_HIGH = 16
"""Descriptors of this number and above are not among those of a program."""

libc = ctypes.CDLL(None, use_errno=True)


def call(name: str, *arguments: Any) -> int:
    """Call a function of the C library. Raises OSError, as it returns a negative number."""
    result = getattr(libc, name)(*(ctypes.c_long(each) if isinstance(each, int) else each for each in arguments))
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{name}: {os.strerror(code)}")
    return result


def become_nobody() -> bool:
    """Give up root, if this process has it and its interpreter is readable without it; return whether it did."""
    if os.geteuid() != 0:
        return False
    child = os.fork()
    if child == 0:
        os.setuid(NOBODY)
        os._exit(not os.access(os.__file__, os.R_OK))
    if os.waitpid(child, 0)[1]:
        return False
    os.setgroups([])
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, NOBODY)
    call("prctl", _SET_DUMPABLE, 1, 0, 0, 0)  # else /proc/self/uid_map would be root's
    return True


class Protection:
    """The layers that work here, and how to enter them."""

    def __init__(self, layers: Sequence[str], folders: Sequence[str], *, files_bytes: int) -> None:
        """layers: those to use, where they work. folders: readable ones, beside the system's libraries."""
        self.files_bytes = files_bytes
        readable = [os.path.realpath(folder) for folder in (*folders, *_SYSTEM)]
        usable = (each for each in _SCRATCH if os.path.isdir(each) and not any(_is_in(f, each) for f in readable))
        self.scratch = next(usable, "")
        self._opened: list[tuple[int, int]] = []
        for paths, rights in ((readable, _READ), (_DEVICES, 1 << 2 | _WRITE)):
            for path in filter(os.path.exists, paths):
                opened = os.open(path, os.O_PATH)
                high = fcntl.fcntl(opened, fcntl.F_DUPFD_CLOEXEC, _FIRST_HIGH)
                os.close(opened)
                self._opened.append((high, rights if os.path.isdir(path) else rights & ~(1 << 3)))
        self.landlock_version = 0
        with contextlib.suppress(OSError):
            self.landlock_version = call("syscall", _CREATE_RULESET, None, 0, 1)
        self.missing: dict[str, str] = {}
        """The reason of each layer that is not used, by its name."""
        self.missing = self._try(layers)

    def has(self, layer: str) -> bool:
        return layer not in self.missing

    def _try(self, layers: Sequence[str]) -> dict[str, str]:
        steps: Mapping[str, Callable[[], None]] = {
            "namespaces": _unshare,
            "mounts": self._mount,
            "landlock": self._restrict,
            "seccomp": lambda: seccomp.install(libc, denies_signals=True),
        }
        readable, writable = os.pipe()
        if os.fork() == 0:
            missing = {name: "is left out by an option" for name in LAYERS if name not in layers}
            call("prctl", _NO_NEW_PRIVILEGES, 1, 0, 0, 0)
            for name, step in steps.items():
                if name == "mounts" and "namespaces" in missing:  # root would change the machine's own mounts
                    missing.setdefault(name, "needs namespaces")
                if name in missing:
                    continue
                try:
                    step()
                except OSError as error:
                    missing[name] = str(error)
            os.write(writable, json.dumps(missing).encode())
            os._exit(0)
        os.close(writable)
        with open(readable, "rb") as report:
            return json.loads(report.read())

    def separate(self) -> None:
        """Give the next child of this process namespaces of its own; this process is in most of them."""
        if self.has("namespaces"):
            _unshare()
        if self.has("mounts"):
            self._mount()

    def enter(self, *, cpu_s: int, memory_bytes: int, keep: int) -> None:
        """Restrict this process for good. keep: number of descriptors, from 0, that stay open."""
        os.setsid()
        call("prctl", _SET_DEATH_SIGNAL, _KILL, 0, 0, 0)
        with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as score:
            score.write("1000")  # if the machine's memory ends, this process does
        limits = {"CPU": cpu_s, "AS": memory_bytes, "FSIZE": self.files_bytes, "NOFILE": _DESCRIPTORS, "CORE": 0}
        if self.has("namespaces"):  # elsewhere the limit counts all processes of the user
            limits["NPROC"] = _THREADS
        call("capset", struct.pack("Ii", 0x20080522, 0), bytes(24))
        call("prctl", _NO_NEW_PRIVILEGES, 1, 0, 0, 0)
        if self.has("landlock"):
            self._restrict()
        os.closerange(keep, os.sysconf("SC_OPEN_MAX"))
        for name, limit in limits.items():
            number = getattr(resource, f"RLIMIT_{name}")
            most = resource.getrlimit(number)[1]
            limit = limit if most == resource.RLIM_INFINITY else min(limit, most)
            resource.setrlimit(number, (limit, limit))
        if self.has("seccomp"):
            seccomp.install(libc, denies_signals=not self.has("namespaces"))

    def _mount(self) -> None:
        """Make everything read-only, hide /proc, and mount a folder of limited size at `scratch`."""
        attributes = struct.pack("QQQQ", 1 | 2, 0, 1 << 18, 0)  # read-only, no setuid; private
        call("syscall", _MOUNT_SETATTR, -100, b"/", 0x8000, attributes, len(attributes))
        for place, size in (("/proc", 4096), (self.scratch, self.files_bytes)):
            if place:
                text = f"size={size},nr_inodes=4096,mode=700".encode()
                call("mount", b"tmpfs", place.encode(), b"tmpfs", 2 | 4, text)
        os.chdir(self.scratch or "/")

    def _restrict(self) -> None:
        """Enter Landlock: files by the allowed folders, no TCP, and no signal to a process outside."""
        version = self.landlock_version
        if not version:
            raise OSError("the kernel has no Landlock (Linux 5.13 has it, if lsm= of its command line names it)")
        rights = _RIGHTS[max(first for first in _RIGHTS if first <= version)]
        attributes = struct.pack("QQQ", rights, 3 if version >= 4 else 0, 3 if version >= 6 else 0)
        size = 24 if version >= 6 else 16 if version >= 4 else 8
        ruleset = call("syscall", _CREATE_RULESET, attributes, size, 0)
        opened = [(fd, allowed) for fd, allowed in self._opened]
        if self.has("mounts") and self.scratch:
            opened.append((os.open(self.scratch, os.O_PATH), _SCRATCH_RIGHTS))
        for fd, allowed in opened:
            call("syscall", _ADD_RULE, ruleset, 1, struct.pack("=Qi", allowed & rights, fd), 0)
        call("syscall", _RESTRICT_SELF, ruleset, 0)


def _unshare() -> None:
    user, group = os.geteuid(), os.getegid()
    call("unshare", _NAMESPACES)
    for name, line in (("setgroups", "deny"), ("uid_map", f"{NOBODY} {user} 1"), ("gid_map", f"{NOBODY} {group} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(line)


def _is_in(path: str, folder: str) -> bool:
    return os.path.commonpath([path, folder]) == folder

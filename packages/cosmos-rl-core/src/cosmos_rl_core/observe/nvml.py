"""Memory and utilisation of this machine's GPUs, from NVIDIA's management library, which comes with the driver.

gpus = Gpus.open()                # without the library there are none
for gpu in gpus.read(): ...       # no CUDA context is made

NVML counts all processes on a GPU, and all GPUs of the machine, whatever CUDA_VISIBLE_DEVICES says. Functions and
structures: NVML API reference, nvml.h.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import msgspec

LIBRARY = "libnvidia-ml.so.1"
NAME_BYTES = 96
"""NVML_DEVICE_NAME_V2_BUFFER_SIZE."""


class Gpu(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One GPU, now."""

    index: int
    """NVML's, which orders by PCI address."""
    name: str = ""
    memory: int = 0
    """Bytes in use."""
    memory_total: int = 0
    busy: float | None = None
    """Share of the last sampling period, at most a second, in which a kernel ran; None: the GPU does not count it."""


class _Memory(ctypes.Structure):
    _fields_ = [("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong)]


class _Utilization(ctypes.Structure):
    _fields_ = [("gpu", ctypes.c_uint), ("memory", ctypes.c_uint)]


class Gpus:
    """The GPUs of this machine."""

    def __init__(self, library: Any, handles: Sequence[ctypes.c_void_p]) -> None:
        self._library = library
        self._handles = handles
        self._names = [self._name(handle) for handle in handles]

    @classmethod
    def open(cls, library: Any = None) -> Gpus:
        """Return the GPUs; none where the library is missing or refuses. library: loaded; default: the driver's."""
        try:
            library = ctypes.CDLL(LIBRARY) if library is None else library
        except OSError:
            return cls(None, [])
        count = ctypes.c_uint()
        if library.nvmlInit_v2() != 0 or library.nvmlDeviceGetCount_v2(ctypes.byref(count)) != 0:
            return cls(None, [])
        handles = []
        for index in range(count.value):
            handle = ctypes.c_void_p()
            if library.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(index), ctypes.byref(handle)) == 0:
                handles.append(handle)
        return cls(library, handles)

    def read(self) -> tuple[Gpu, ...]:
        """Return the present state of each GPU; fields that it does not report keep their defaults."""
        gpus = []
        for index, (handle, name) in enumerate(zip(self._handles, self._names)):
            memory, used = _Memory(), _Utilization()
            self._library.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory))  # zeros where it fails
            is_counted = self._library.nvmlDeviceGetUtilizationRates(handle, ctypes.byref(used)) == 0
            gpus.append(
                Gpu(
                    index=index,
                    name=name,
                    memory=memory.used,
                    memory_total=memory.total,
                    busy=used.gpu / 100 if is_counted else None,
                )
            )
        return tuple(gpus)

    def _name(self, handle: ctypes.c_void_p) -> str:
        name = ctypes.create_string_buffer(NAME_BYTES)
        self._library.nvmlDeviceGetName(handle, name, ctypes.c_uint(NAME_BYTES))
        return name.value.decode(errors="replace")

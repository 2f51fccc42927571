"""Stands in for `pynvml`, NVIDIA's management library, with the GPUs of a machine that is described.

    Nvml.open(FakeNvml({"GPU-a": (), "GPU-b": ("MIG-1", "MIG-2")}))

As a module on the import path of other processes it is pretend_gpus/pynvml.py, whose GPUs PRETEND_GPUS lists.
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Mapping, Sequence

Memory = namedtuple("Memory", "total used")
Load = namedtuple("Load", "gpu")
GIB = 2**30
H100 = "NVIDIA H100 80GB HBM3"


class FakeNvml:
    """The functions of `pynvml` that are called. A handle is a UUID."""

    NVML_DEVICE_MIG_ENABLE = 1

    class NVMLError(Exception):
        pass

    def __init__(
        self,
        gpus: Mapping[str, Sequence[str]] | None = None,
        *,
        driver: str = "580.65.06",
        cuda: int = 13010,
        names: Mapping[str, str] | None = None,
        used: Mapping[str, int] | None = None,
        silent: Sequence[str] = (),
    ) -> None:
        """gpus: UUIDs with those of their slices; None: no driver. names, used (GiB): of some GPUs.

        silent: GPUs that do not answer.
        """
        self._gpus, self._driver, self._cuda, self._silent = gpus or {}, driver, cuda, silent
        self._has_driver = gpus is not None
        self._names, self._used = names or {}, used or {}

    def nvmlInit(self):
        if not self._has_driver:
            raise self.NVMLError

    def nvmlDeviceGetCount(self):
        return len(self._gpus)

    def nvmlDeviceGetHandleByIndex(self, index):
        return list(self._gpus)[index]

    def nvmlDeviceGetUUID(self, handle):
        return handle

    def nvmlDeviceGetName(self, handle):
        return self._names.get(handle, H100)

    def nvmlDeviceGetMemoryInfo(self, handle):
        self._answers(handle)
        return Memory(total=80 * GIB, used=self._used.get(handle, 3) * GIB)

    def nvmlDeviceGetUtilizationRates(self, handle):
        self._answers(handle)
        return Load(gpu=25)

    def nvmlDeviceGetMigMode(self, handle):
        self._answers(handle)
        return [int(bool(self._gpus[handle])), 0]

    def nvmlDeviceGetMaxMigDeviceCount(self, handle):
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle, index):
        if index >= len(self._gpus[handle]):
            raise self.NVMLError
        return self._gpus[handle][index]

    def nvmlSystemGetDriverVersion(self):
        return self._driver

    def nvmlSystemGetCudaDriverVersion_v2(self):
        return self._cuda

    def _answers(self, handle):
        if handle in self._silent:
            raise self.NVMLError

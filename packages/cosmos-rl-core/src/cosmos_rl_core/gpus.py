"""The GPUs of this machine, from NVIDIA's management library (NVML), which comes with the driver.

    machine_gpus(os.environ)              # what to share out among workers, as CUDA_VISIBLE_DEVICES takes it
    nvml = Nvml.open()                    # without a driver it has no GPUs
    nvml.devices(), nvml.read()           # no CUDA context is made

NVML sees the devices that the container has, and all processes on them, whatever CUDA_VISIBLE_DEVICES says. Device
files do not count them: /dev/nvidia2 of a container may be CUDA's GPU 0, a GPU in slices (MIG) has one file, WSL2 has
none.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from cosmos_rl_core.errors import UserError

VISIBLE_GPUS = "CUDA_VISIBLE_DEVICES"
AMD_GPUS = ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")
"""Variables that choose among AMD's GPUs."""
SLICE = "MIG-"
"""Begins the UUID of a slice of a GPU."""
ON_CPU = f'set {VISIBLE_GPUS} to nothing, or [run] device = "cpu", to run on the CPU'
"""End of an error about GPUs."""
_SHORT = 12
"""Characters of a UUID that are shown: enough for the GPUs of a machine."""
_NONE = ("-1", "NoDevFiles")
"""Entries of CUDA_VISIBLE_DEVICES at which CUDA stops reading: "-1" is the usual way to hide all GPUs."""


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


class GpuDevice(msgspec.Struct, frozen=True, kw_only=True):
    """A GPU, or a slice of one, that CUDA can open."""

    uuid: str
    """As CUDA_VISIBLE_DEVICES takes it: "GPU-..." or "MIG-..."."""
    name: str
    """Such as "NVIDIA H100 80GB HBM3"."""
    memory: int
    """Bytes in use, by any process."""
    memory_total: int

    @property
    def free(self) -> int:
        return self.memory_total - self.memory


class Nvml:
    """NVIDIA's management library. Without it, or without a driver, there are no GPUs and no versions."""

    def __init__(self, library: Any) -> None:
        """library: `pynvml`, initialised; None: no driver."""
        self._library = library
        self._handles: list[Any] = []
        if library is not None:
            for index in range(library.nvmlDeviceGetCount()):
                self._handles.append(library.nvmlDeviceGetHandleByIndex(index))

    @classmethod
    def open(cls, library: Any = None) -> Nvml:
        """Initialise the library. library: in place of `pynvml`."""
        if library is None:
            import pynvml as library
        try:
            library.nvmlInit()
            return cls(library)
        except library.NVMLError:  # no driver, or one that does not answer
            return cls(None)

    @property
    def driver(self) -> str:
        """Version of the driver, such as "580.65.06"; empty without one."""
        return self._library.nvmlSystemGetDriverVersion() if self._library is not None else ""

    @property
    def cuda(self) -> tuple[int, int]:
        """The newest CUDA that the driver can run, such as (13, 0); (0, 0) without one."""
        version = self._library.nvmlSystemGetCudaDriverVersion_v2() if self._library is not None else 0
        return version // 1000, version % 1000 // 10

    def read(self) -> tuple[Gpu, ...]:
        """Return the present state of each GPU; fields that it does not report keep their defaults."""
        return tuple(self._gpu(index, handle) for index, handle in enumerate(self._handles))

    def devices(self) -> list[GpuDevice]:
        """Return the GPUs that CUDA can open: of a GPU in slices its slices."""
        return [self._device(handle) for gpu in self._handles for handle in self._slices(gpu)]

    def device(self, name: str) -> GpuDevice | None:
        """Return the GPU that an entry of CUDA_VISIBLE_DEVICES names; None if there is none.

        Numbers count in NVML's order, which is CUDA's where all GPUs are of one kind.
        """
        devices = self.devices()
        if name.isdecimal():
            return devices[int(name)] if int(name) < len(devices) else None
        return next((device for device in devices if device.uuid.startswith(name)), None)

    def _gpu(self, index: int, handle: Any) -> Gpu:
        nvml = self._library
        memory = self._asked(nvml.nvmlDeviceGetMemoryInfo, handle)
        load = self._asked(nvml.nvmlDeviceGetUtilizationRates, handle)
        return Gpu(
            index=index,
            name=self._asked(nvml.nvmlDeviceGetName, handle) or "",
            memory=memory.used if memory is not None else 0,
            memory_total=memory.total if memory is not None else 0,
            busy=load.gpu / 100 if load is not None else None,
        )

    def _device(self, handle: Any) -> GpuDevice:
        nvml = self._library
        memory = self._asked(nvml.nvmlDeviceGetMemoryInfo, handle)
        return GpuDevice(
            uuid=nvml.nvmlDeviceGetUUID(handle),
            name=self._asked(nvml.nvmlDeviceGetName, handle) or "",
            memory=memory.used if memory is not None else 0,
            memory_total=memory.total if memory is not None else 0,
        )

    def _slices(self, handle: Any) -> list[Any]:
        """Return the slices of a GPU that is cut (MIG), which CUDA then cannot open as a whole; else the GPU itself."""
        nvml = self._library
        mode = self._asked(nvml.nvmlDeviceGetMigMode, handle)
        if mode is None or mode[0] != nvml.NVML_DEVICE_MIG_ENABLE:
            return [handle]
        slots = range(nvml.nvmlDeviceGetMaxMigDeviceCount(handle))  # some are empty
        slices = [self._asked(nvml.nvmlDeviceGetMigDeviceHandleByIndex, handle, slot) for slot in slots]
        return [each for each in slices if each is not None]

    def _asked(self, function: Any, *arguments: Any) -> Any:
        """Return what NVML answers; None where this GPU, or this driver, cannot answer it."""
        try:
            return function(*arguments)
        except self._library.NVMLError:
            return None


def machine_gpus(
    environment: Mapping[str, str], device: str = "auto", *, nvml: Nvml | None = None, root: Path = Path("/")
) -> list[str]:
    """Return the GPUs that this process may share out, as CUDA_VISIBLE_DEVICES takes them; empty for the CPU.

    Those of CUDA_VISIBLE_DEVICES as they stand there (numbers, UUIDs, slices), else the UUIDs that NVML reports.
    device: [run] device. Raises UserError for AMD's GPUs, and for NVIDIA's that cannot be counted without NVML.
    """
    if device == "cpu":
        return []
    if VISIBLE_GPUS in environment:
        names = [name.strip() for name in environment[VISIBLE_GPUS].split(",")]
        end = next((place for place, name in enumerate(names) if name in _NONE), len(names))
        return [name for name in names[:end] if name]
    opened = Nvml.open() if nvml is None else nvml
    if gpus := [device.uuid for device in opened.devices()]:
        return gpus
    if amd := [name for name in AMD_GPUS if environment.get(name)]:
        raise UserError(f"{amd[0]} is set, and AMD's GPUs are not supported: unset it, or {ON_CPU}")
    if not opened.driver and (file := _device_file(root)):
        raise UserError(
            f"this machine has {file}, but NVIDIA's libnvidia-ml.so.1 is missing or does not answer (nvidia-smi shows "
            f"it): install the driver, start the container with `--gpus all`, or {ON_CPU}"
        )
    return []


def short_names(gpus: Iterable[str]) -> str:
    """Return "GPU-8f2a1b3c,GPU-77d0e1f2": UUIDs by their first characters, numbers as they are."""
    return ",".join(gpu[:_SHORT] for gpu in gpus)


def _device_file(root: Path) -> str:
    """Return a file by which NVIDIA's driver offers its GPUs to this machine; empty without one.

    WSL2 has /dev/dxg for GPUs of any maker, and NVIDIA's libraries in a folder of their own.
    """
    files = sorted(path.name for path in (root / "dev").glob("nvidia[0-9]*"))
    if not files and (root / "dev/dxg").exists() and (root / "usr/lib/wsl/lib/libcuda.so.1").exists():
        files = ["dxg"]
    return f"/dev/{files[0]}" if files else ""

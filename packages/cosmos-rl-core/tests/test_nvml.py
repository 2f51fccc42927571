"""GPUs of a machine, as a stand-in for NVIDIA's library reports them: parts of nodes, slices, WSL2, no driver."""

from __future__ import annotations

import pytest

from cosmos_rl_core.errors import UserError
from cosmos_rl_core.gpus import Gpu, GpuDevice, Nvml, machine_gpus, short_names
from doubles.fake_nvml import GIB, H100, FakeNvml


def nvml(*gpus, slices=None, silent=()):
    by_uuid = {gpu: () for gpu in gpus} | (slices or {})
    return Nvml.open(FakeNvml(by_uuid, silent=silent))


NO_DRIVER = Nvml.open(FakeNvml())


@pytest.fixture
def root(tmp_path):
    """Make a file system with these files."""

    def have(*files):
        for file in files:
            path = tmp_path / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
        return tmp_path

    return have


def test_a_container_with_part_of_a_node_has_its_gpus_by_uuid(root):
    files = root("dev/nvidia2", "dev/nvidia3", "dev/nvidiactl", "dev/nvidia-uvm")
    assert machine_gpus({}, nvml=nvml("GPU-c", "GPU-d"), root=files) == ["GPU-c", "GPU-d"]


def test_a_list_of_the_user_is_shared_out_as_it_stands():
    machine = nvml("GPU-a", "GPU-b", "GPU-c", "GPU-d")
    for text, gpus in {
        "3,1": ["3", "1"],
        " GPU-8f2 , 0": ["GPU-8f2", "0"],
        "MIG-1,MIG-2": ["MIG-1", "MIG-2"],
        "0,-1,2": ["0"],  # as CUDA reads it
        "NoDevFiles": [],
        "-1": [],
        "": [],
    }.items():
        assert machine_gpus({"CUDA_VISIBLE_DEVICES": text}, nvml=machine) == gpus


def test_a_gpu_in_slices_is_its_slices_and_its_neighbour_is_whole():
    machine = nvml("GPU-b", slices={"GPU-a": ("MIG-1", "MIG-2", "MIG-3")})
    assert machine_gpus({}, nvml=machine) == ["GPU-b", "MIG-1", "MIG-2", "MIG-3"]


def test_a_machine_without_gpus_has_none(root):
    assert machine_gpus({}, nvml=NO_DRIVER, root=root()) == []
    assert machine_gpus({}, nvml=nvml(), root=root("dev/dxg")) == []


def test_wsl2_has_no_device_files_and_its_gpus_count(root):
    files = root("dev/dxg", "usr/lib/wsl/lib/libcuda.so.1")
    assert machine_gpus({}, nvml=nvml("GPU-a"), root=files) == ["GPU-a"]
    with pytest.raises(UserError, match=r"/dev/dxg, but NVIDIA's libnvidia-ml.so.1 is missing"):
        machine_gpus({}, nvml=NO_DRIVER, root=files)


def test_wsl2_on_a_machine_of_another_maker_means_the_cpu(root):
    assert machine_gpus({}, nvml=NO_DRIVER, root=root("dev/dxg")) == []


def test_devices_that_nobody_can_count_are_an_error_and_not_the_cpu(root):
    files = root("dev/nvidia0")
    with pytest.raises(UserError, match=r"has /dev/nvidia0, but .* set CUDA_VISIBLE_DEVICES to nothing"):
        machine_gpus({}, nvml=NO_DRIVER, root=files)
    assert machine_gpus({"CUDA_VISIBLE_DEVICES": ""}, nvml=NO_DRIVER, root=files) == []


def test_gpus_of_amd_are_refused_by_name(root):
    with pytest.raises(UserError, match="ROCR_VISIBLE_DEVICES is set, and AMD's GPUs are not supported"):
        machine_gpus({"ROCR_VISIBLE_DEVICES": "0"}, nvml=NO_DRIVER, root=root())
    assert machine_gpus({"ROCR_VISIBLE_DEVICES": "0"}, nvml=nvml("GPU-a"), root=root()) == ["GPU-a"]


def test_memory_and_load_of_each_gpu_and_nothing_of_one_that_does_not_answer():
    machine = nvml("GPU-a", "GPU-b", silent=("GPU-b",))
    assert machine.read() == (
        Gpu(index=0, name=H100, memory=3 * GIB, memory_total=80 * GIB, busy=0.25),
        Gpu(index=1, name=H100),
    )
    assert machine.devices() == [
        GpuDevice(uuid="GPU-a", name=H100, memory=3 * GIB, memory_total=80 * GIB),
        GpuDevice(uuid="GPU-b", name=H100, memory=0, memory_total=0),
    ]
    assert (machine.driver, machine.cuda) == ("580.65.06", (13, 1))


def test_this_machine_without_a_driver_has_no_gpus_and_no_versions():
    assert (NO_DRIVER.read(), NO_DRIVER.devices(), NO_DRIVER.driver, NO_DRIVER.cuda) == ((), [], "", (0, 0))


def test_an_entry_of_the_list_is_a_number_or_the_start_of_a_uuid():
    machine = nvml("GPU-1a2b", "GPU-77ff-2")
    assert [getattr(machine.device(name), "uuid", None) for name in ("1", "GPU-1a", "2", "MIG-5")] == [
        "GPU-77ff-2",
        "GPU-1a2b",
        None,
        None,
    ]
    assert short_names(["GPU-8f2a1b3c-3ce6-6fda", "3"]) == "GPU-8f2a1b3c,3"


def test_a_run_on_the_cpu_by_its_recipe_shares_out_no_gpu():
    assert machine_gpus({}, device="cpu", nvml=nvml("GPU-a")) == []
    assert machine_gpus({"CUDA_VISIBLE_DEVICES": "0"}, device="cpu", nvml=nvml("GPU-a")) == []

import pytest

from cosmos_rl_core.errors import UserError
from cosmos_rl_core.processes import allot, machine_gpus


def test_the_devices_of_the_machine_in_order(tmp_path):
    for name in ("nvidia10", "nvidia2", "nvidia0", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    assert machine_gpus({}, devices=tmp_path) == ["0", "2", "10"]


def test_what_the_user_lets_us_see_counts(tmp_path):
    (tmp_path / "nvidia0").touch()
    assert machine_gpus({"CUDA_VISIBLE_DEVICES": "3, GPU-8f2"}, devices=tmp_path) == ["3", "GPU-8f2"]
    assert machine_gpus({"CUDA_VISIBLE_DEVICES": ""}, devices=tmp_path) == []


def test_the_policys_ranks_come_first_then_the_rollouts():
    assert allot(["0", "1", "2", "3"], [2, 1, 1]) == [["0", "1"], ["2"], ["3"]]


def test_fewer_gpus_than_processes_are_shared():
    assert allot(["0"], [1, 1, 1]) == [["0"], ["0"], ["0"]]
    assert allot(["0", "1"], [2, 1, 1]) == [["0", "1"], ["0"], ["1"]]


def test_two_ranks_never_share_a_gpu():
    with pytest.raises(UserError, match=r"a replica needs 2 GPUs of this machine, one per rank, but sees 1 \(3\)"):
        allot(["3"], [2, 1])


def test_a_machine_without_gpus_gives_none():
    assert allot([], [2, 1]) == [[], []]

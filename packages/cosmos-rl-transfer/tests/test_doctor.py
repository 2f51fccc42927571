import pytest

from cosmos_rl_transfer import doctor
from cosmos_rl_transfer.doctor import (
    MEMCPY,
    RAW_STREAM,
    Measurement,
    TransportResult,
    _weights,
    diagnose,
    render,
    ucx_path,
)
from cosmos_rl_transfer.transports.base import TransportUnavailable

UCX_SAYS = """
[179.7:0]   | remote memory read by ucp_get*(multi) into host memory from host |
[179.7:0]   +-----------+-------------+-------------------------------------------+
[179.7:0]   | Range     | Description |                  Config                   |
[179.7:0]   +-----------+-------------+-------------------------------------------+
[179.7:0]   | 0..262144 | copy-out    | tcp/lo                                    |
[179.7:0]   | 262145..inf | zero-copy | cma/memory                                |
[179.7:0]   +-----------+-------------+-------------------------------------------+
[179.8:1]   | remote memory write by ucp_put* from host memory to host |
[179.8:1]   | 0..inf | zero-copy | somewhere/else |
"""


def test_the_path_is_read_off_ucx_own_table():
    assert ucx_path(UCX_SAYS) == "copy-out over tcp/lo, zero-copy over cma/memory"
    assert ucx_path("nothing of the kind") == "UCX does not report its path"


@pytest.mark.parametrize("name", [MEMCPY, RAW_STREAM, "shm", "tcp"])
def test_transports_are_measured_as_a_memcpy_and_a_raw_stream_are(name):
    with Measurement(name, mib=4, bucket_mib=1) as measurement:
        speed = measurement.speed(3)
    assert len(speed.seconds) == 3
    assert speed.gigabytes_per_s == pytest.approx((4 << 20) / sorted(speed.seconds)[1] / 1e9)
    assert 0 < speed.latency_us < 1e6


@pytest.mark.ci
def test_what_does_not_work_raises_with_the_reason():
    with pytest.raises(TransportUnavailable, match=r"^torch.distributed has no process group here"):
        Measurement("collective", mib=1, bucket_mib=1).__enter__()


def test_the_table_says_what_auto_offers():
    text = render(
        [
            TransportResult("shm", True, "a copy", 17.44, 27.2),
            TransportResult("nixl", False, "NIXL is not installed"),
            TransportResult("tcp", True, "over loopback", 3.0, 40.0),
        ]
    )
    assert text.splitlines() == [
        "TRANSPORT  WORKS  GB/S  LATENCY US  HOW, OR WHY NOT",
        "shm        yes    17.4  27          a copy",
        "nixl       no     -     -           NIXL is not installed",
        "tcp        yes    3.0   40          over loopback",
        "",
        'transport = "auto" offers shm here',
    ]


@pytest.mark.slow
def test_everything_is_tried_and_nothing_raises():
    found = {finding.name: finding for finding in diagnose(mib=4, rounds=1)}
    assert {"shm", "tcp", "nixl", "collective", "rdma", "cuda ipc", "weights"} <= set(found)
    assert all(finding.reason for finding in found.values())
    for name in ("memcpy", "raw stream", "shm", "tcp"):
        assert found[name].works, found[name].reason
    assert not found["nixl"].works or "over" in found["nixl"].reason


@pytest.mark.parametrize(("gpus", "path"), [(0, "pageable"), (2, "pinned host")])
def test_it_names_the_memory_through_which_weights_leave(gpus, path):
    weights, ipc = _weights(gpus)
    assert (weights.name, weights.works, weights.reason) == ("weights", True, path)
    assert ("no CUDA device" in ipc.reason) == (gpus == 0)


def test_the_checks_of_the_machine_are_notes_but_for_tcp(monkeypatch):
    works = {"shm"}

    def measured(name, how, *_):
        return (
            TransportResult(name, True, how, 17.0, 30.0) if name in works else TransportResult(name, False, "refused")
        )

    monkeypatch.setattr(doctor, "_measured", measured)
    lines = {line.name: line for line in doctor.checks()}
    assert lines["transport shm"].text == "17.0 GB/s, 30 us, one copy"
    assert [lines[f"transport {name}"].level for name in ("shm", "tcp", "nixl")] == ["ok", "bad", "note"]
    assert lines["transport nixl"].fix == "without it shm and tcp are used"
    assert lines["transport auto"].text.startswith("offers shm")
    works.clear()
    assert "transport auto" not in {line.name for line in doctor.checks()}

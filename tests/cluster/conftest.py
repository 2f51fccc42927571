"""A real Slurm on the loopback interface, and the option --no-skips."""

import os

import pytest
from loopback_slurm import LoopbackSlurm


def pytest_addoption(parser):
    parser.addoption("--no-skips", action="store_true", help="tests/cluster: what would be skipped fails")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if report.skipped and item.config.getoption("--no-skips", default=False):
        report.outcome = "failed"
        report.longrepr = f"{item.nodeid} was skipped, with --no-skips: {call.excinfo.value}"
    return report


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    """Three nodes."""
    if missing := LoopbackSlurm.missing():
        pytest.skip(f"Slurm is not installed (tests/cluster/README.md): {', '.join(missing)}")
    if os.geteuid() != 0:
        pytest.skip("this Slurm without munge starts as root alone")
    with LoopbackSlurm(tmp_path_factory.mktemp("slurm"), nodes=3) as cluster:
        yield cluster

"""A real Slurm on the loopback interface."""

import os

import pytest
from loopback_slurm import LoopbackSlurm


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    """Three nodes."""
    if missing := LoopbackSlurm.missing():
        pytest.skip(f"Slurm is not installed (tests/cluster/README.md): {', '.join(missing)}")
    if os.geteuid() != 0:
        pytest.skip("this Slurm without munge starts as root alone")
    with LoopbackSlurm(tmp_path_factory.mktemp("slurm"), nodes=3) as cluster:
        yield cluster

"""The name of a worker, which a user may give."""

import pytest

from cosmos_rl_core.errors import UserError
from cosmos_rl_core.workers.node import WorkerAddress


@pytest.mark.parametrize("name", ["rollout 1", "größe", "a/b", "rollout-1\n", "x" * 101])
def test_a_malformed_name_is_named_with_what_a_name_may_have(name):
    worker = WorkerAddress(role="rollout", name=name, controller="tcp://127.0.0.1:1")
    with pytest.raises(UserError, match=r"--name .*1 to 100 letters"):
        worker.resolved()


@pytest.mark.parametrize("name", ["", "rollout-1", "node_3.rollout", "x" * 100])
def test_a_good_name_is_kept_and_a_missing_one_made(name):
    worker = WorkerAddress(role="policy", name=name, controller="tcp://127.0.0.1:1")
    assert worker.resolved().name == (name or "policy-0")

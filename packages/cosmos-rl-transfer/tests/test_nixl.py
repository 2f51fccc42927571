import pytest

from cosmos_rl_transfer.conformance import CHECKS, Ends
from cosmos_rl_transfer.transports.nixl import Nixl


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_conformance(check):
    check(Ends.of(Nixl))

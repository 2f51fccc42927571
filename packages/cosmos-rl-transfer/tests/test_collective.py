import socket
import threading
from datetime import timedelta
from pathlib import Path

import pytest
from torch.distributed import FileStore, HashStore, ProcessGroupGloo

from cosmos_rl_transfer.testing.conformance import BUCKET_BYTES, CHECKS, Ends
from cosmos_rl_transfer.testing.sample_exchange import PublisherProcess
from cosmos_rl_transfer.transports.base import TransportUnavailable
from cosmos_rl_transfer.transports.collective import Collective
from cosmos_rl_transfer.wire.link import Link

TIMEOUT = timedelta(seconds=5)
START_TIMEOUT = timedelta(seconds=120)


def groups(size=2):
    """All ranks of a gloo group, in this process."""
    store, made = HashStore(), {}

    def join(rank):
        made[rank] = ProcessGroupGloo(store, rank, size, TIMEOUT)

    threads = [threading.Thread(target=join, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [made[rank] for rank in range(size)]


def across_processes(store):
    script = Path(__file__).with_name("collective_process.py")
    process = PublisherProcess(str(script), str(store), str(BUCKET_BYTES))
    shared = FileStore(str(store), 2)
    shared.wait(["imported"], START_TIMEOUT)  # the group's own timeout is too short for a process that imports torch
    return process, Collective(ProcessGroupGloo(shared, 1, 2, TIMEOUT))


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_conformance(check, tmp_path):
    publisher, subscriber = (Collective(group) for group in groups())
    start = lambda: across_processes(tmp_path / "store")  # noqa: E731
    check(Ends(publisher=publisher, subscriber=subscriber, start=start, max_readers=1))


@pytest.fixture
def link():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield Link(ours, timeout_s=1, side="subscriber")


def test_without_a_process_group_it_says_what_to_call():
    with pytest.raises(TransportUnavailable, match="init_process_group"):
        Collective().open(bucket_bytes=10, num_slots=1)


def test_of_more_than_two_ranks_the_peer_has_to_be_named():
    first, *_ = groups(3)
    with pytest.raises(TransportUnavailable, match="3 ranks: set the other one, peer="):
        Collective(first).open(bucket_bytes=10, num_slots=1)
    Collective(first, peer=2).open(bucket_bytes=10, num_slots=1).close()


def test_a_publisher_that_means_another_subscriber_is_refused(link):
    first, second, third = groups(3)
    offer = Collective(first, peer=1).open(bucket_bytes=10, num_slots=1).offer
    Collective(second, peer=0).attach(link, offer=offer, memory=[]).close()
    with pytest.raises(TransportUnavailable, match="rank 0 of the process group is not the publisher"):
        Collective(third, peer=0).attach(link, offer=offer, memory=[])

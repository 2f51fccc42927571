"""A SamplePublisher at rank 0 of a gloo group of two, for test_collective: STORE BUCKET_BYTES; see sample_exchange."""

import sys
from datetime import timedelta

from torch.distributed import FileStore, ProcessGroupGloo

from cosmos_rl_transfer.testing.sample_exchange import serve_process
from cosmos_rl_transfer.transports.collective import Collective

if __name__ == "__main__":
    store, bucket_bytes = sys.argv[1:]
    shared = FileStore(store, 2)
    shared.set("imported", "")
    group = ProcessGroupGloo(shared, 0, 2, timedelta(seconds=30))
    serve_process(Collective(group), bucket_bytes=int(bucket_bytes))

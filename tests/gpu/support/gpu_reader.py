"""Tensors of a version, the same in two processes; and the process that reads them: python gpu_reader.py ADDRESS ...

Prints a line of JSON for each version that has arrived.
"""

from __future__ import annotations

import asyncio
import json
import sys

import torch

TOKEN = b"token of a rehearsal"


def numbered(version: int, *, num: int, size: int, device: torch.device) -> dict[str, torch.Tensor]:
    """`num` tensors bfloat16 [size] of random values that only this version has."""
    random = torch.Generator(device)
    tensors = {}
    for number in range(num):
        random.manual_seed(1000 * version + number)
        tensors[f"w{number}"] = torch.randn(size, generator=random, device=device).bfloat16()
    return tensors


async def read(address: str, transport: str, *, num: int, size: int, versions: int) -> None:
    """Read each version, and print whether it has the bits of `numbered`."""
    from cosmos_rl_core.parallel.device import own_device, use_device
    from cosmos_rl_core.weight_sync import SyncSection
    from cosmos_rl_transfer import Subscriber

    device = own_device()
    use_device(device)
    live = {name: torch.zeros_like(tensor) for name, tensor in numbered(0, num=num, size=size, device=device).items()}
    settings = SyncSection.model_validate({"transport": transport, "staging": "in_place"})
    subscriber = Subscriber(address, live, token=TOKEN, settings=settings)
    for version in range(1, versions + 1):
        await subscriber.stage(after=version - 1)
        subscriber.apply()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        expected, pulled = numbered(version, num=num, size=size, device=device), subscriber.pulled
        equal = all(torch.equal(live[name].view(torch.int16), expected[name].view(torch.int16)) for name in live)
        counts = {"seconds": pulled.seconds, "bytes": pulled.num_bytes, "repaired": len(pulled.repaired)}
        print(json.dumps({"version": version, "equal": equal, **counts}), flush=True)
    await subscriber.close()


if __name__ == "__main__":
    address, transport, *counts = sys.argv[1:]
    num, size, versions = map(int, counts)
    asyncio.run(read(address, transport, num=num, size=size, versions=versions))

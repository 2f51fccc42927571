"""FileSync, the weight sync of tests: whichever side closes first, no connection is left open."""

import asyncio
from pathlib import Path

import pytest
import torch
import uvloop

from cosmos_rl_core.testing.file_sync import FilePublisher, FileSubscriber

WEIGHTS = {"weight": torch.ones(2)}


async def subscriber_first(publisher, subscriber):
    await subscriber.stage(after=-1)
    await subscriber.close()
    async with asyncio.timeout(10.0):
        while publisher._writers:  # until the publisher has read the end of the connection
            await asyncio.sleep(0)
    await publisher.close()


async def publisher_first(publisher, subscriber):
    await subscriber.stage(after=-1)
    await publisher.close()
    with pytest.raises(ConnectionError):
        await subscriber.stage(after=0)
    await subscriber.close()


async def while_connecting(publisher, subscriber):
    staging = asyncio.create_task(subscriber.stage(after=0))
    await asyncio.sleep(0)
    await asyncio.gather(publisher.close(), asyncio.wait([staging]))
    await subscriber.close()


@pytest.mark.parametrize("close", [subscriber_first, publisher_first, while_connecting])
def test_nothing_is_left_open(close):
    """pytest raises what the loop finds unclosed when it closes."""

    async def main():
        publisher = FilePublisher()
        await publisher.publish(0, WEIGHTS)
        await close(publisher, FileSubscriber(Path(publisher.address), WEIGHTS))

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(asyncio.wait_for(main(), 10.0))

"""Weights of a model that are sent to an engine, version by version; without those of frozen parts."""

from contextlib import asynccontextmanager

from cosmos_rl_llm.model.causal_lm import trained_weights
from cosmos_rl_transfer.publish.publisher import Publisher

TOKEN = b"the secret of the test"


@asynccontextmanager
async def sent_weights(engine, model, settings):
    """Yield a coroutine function that sends the model's weights to the engine as a version."""
    publisher = Publisher(trained_weights(model), token=TOKEN)
    subscriber = await engine.subscriber(publisher.address, settings=settings, token=TOKEN)

    async def send(version):
        await publisher.publish(version, trained_weights(model))
        assert await subscriber.stage(after=version - 1) == version
        await engine.switch(version, subscriber.apply)
        await publisher.fence()

    try:
        yield send
    finally:
        await subscriber.close()
        await publisher.close()

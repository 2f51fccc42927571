"""An agent as it runs in production: OpenAI's client, and nothing of Cosmos-RL.

It guesses the secret number of its row. Two lines train it: where the model is comes from the environment, as for any
client of OpenAI's, and the reward is sent at the end.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

from openai import AsyncOpenAI, DefaultAsyncHttpxClient

TURNS = 2
PLAYED_AT_ONCE = 64


async def guess(client: AsyncOpenAI, secret: str) -> float:
    """Play one game and return its reward."""
    messages: list[Any] = [{"role": "user", "content": "?"}]
    for _ in range(TURNS):
        answer = await client.chat.completions.create(model="policy", messages=messages, max_tokens=2)
        said = answer.choices[0].message.content or ""
        if said == secret:
            return 1.0
        if answer.choices[0].finish_reason == "length":
            return 0.0
        hint = "<" if said.isdigit() and secret < said else ">" if said.isdigit() else "?"
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": hint}]
    return 0.0


async def send(client: AsyncOpenAI, url: str, reward: float) -> None:
    await client.post(url, body={"reward": reward}, cast_to=object)


async def play_row() -> None:
    """Play the row of this process, which [agent] command started."""
    async with AsyncOpenAI() as client:  # reads OPENAI_BASE_URL and OPENAI_API_KEY
        reward = await guess(client, json.loads(os.environ["COSMOS_RL_ROW"])["secret"])
        await send(client, os.environ["COSMOS_RL_DONE_URL"], reward)


async def play_rows(run: Path) -> None:
    """Ask a run for rows and play many at a time, until the run is over. run: its directory."""
    address = run / "endpoints" / "rollout-0"
    while not address.exists():
        await asyncio.sleep(0.1)
    base_url, token = address.read_text().strip(), (run / "agent_token").read_text().strip()
    async with DefaultAsyncHttpxClient(timeout=60) as connections:

        async def play() -> None:
            while (
                row := await connections.post(
                    base_url.removesuffix("/v1") + "/rollouts", headers={"Authorization": f"Bearer {token}"}
                )
            ).status_code in (200, 503):
                if row.status_code == 200:
                    own = row.json()
                    client = AsyncOpenAI(base_url=own["base_url"], api_key=own["api_key"], http_client=connections)
                    await send(client, own["done_url"], await guess(client, own["row"]["secret"]))

        await asyncio.gather(*(play() for _ in range(PLAYED_AT_ONCE)), return_exceptions=True)


if __name__ == "__main__":
    asyncio.run(play_rows(Path(sys.argv[1])) if len(sys.argv) > 1 else play_row())

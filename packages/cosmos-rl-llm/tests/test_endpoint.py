"""The endpoint over HTTP: formats, keys, ends, and what a client can do wrong."""

import asyncio
import contextlib
import json
import re

import httpx
import pytest
from endpoint_service import PROMPT, TOKEN, WrittenEngine, endpoint, make_chat

from cosmos_rl_core.errors import SampleError
from cosmos_rl_core.types import Sampling

SAMPLING = Sampling(max_terms=100)
HELLO = [{"role": "user", "content": "hello"}]
ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}


@contextlib.asynccontextmanager
async def playing(*texts, needs_reward=True, num_samples=1, sampling=SAMPLING, **section):
    """Yield a client, the rows of a prompt's rollouts, the engine, the service and the group that is generated."""
    engine = WrittenEngine(make_chat(), *texts)
    engine.drawing = asyncio.Event()
    section = {"retries": 0, **section}
    async with (
        endpoint(engine, needs_reward=needs_reward, **section) as service,
        httpx.AsyncClient(base_url=service.url, trust_env=False, timeout=20) as client,
    ):
        group = asyncio.create_task(service.agents.generate(PROMPT, num_samples=num_samples, sampling=sampling, seed=1))
        rows = [(await client.post("/rollouts", headers=service.headers())).json() for _ in range(num_samples)]
        try:
            yield client, rows, engine, service, group
        finally:
            group.cancel()
            await asyncio.gather(group, return_exceptions=True)


def bearer(key):
    return {"authorization": f"Bearer {key}"}


def chat(client, row, messages=HELLO, *, headers=None, **fields):
    body = {"model": "any", "messages": messages, **fields}
    return client.post("/v1/chat/completions", json=body, headers={**bearer(row["api_key"]), **(headers or {})})


def done(client, row, **body):
    return client.post(f"/rollouts/{row['id']}/done", json=body, headers=bearer(row["api_key"]))


def error_of(reply):
    error = reply.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return reply.status_code, error["code"], error["message"]


def events_of(reply):
    assert reply.headers["content-type"].startswith("text/event-stream")
    lines = [line.removeprefix("data: ") for line in reply.text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) if line != "[DONE]" else None for line in lines]


def test_a_row_is_played_and_its_group_is_what_was_drawn():
    async def play():
        async with playing("four") as (client, [row], engine, service, group):
            assert row["row"] == PROMPT.row
            assert row["base_url"] == f"{service.url}/v1"
            assert row["done_url"] == f"{service.url}/rollouts/{row['id']}/done"
            reply = await chat(client, row, logprobs=True)
            assert (await done(client, row, reward=0.5)).json() == {"id": row["id"], "status": "done"}
            return reply.json(), engine, await group

    whole, engine, (text, [rollout]) = asyncio.run(play())
    [(before, drawn)] = engine.drawn
    [choice] = whole["choices"]
    assert choice["message"] == {"role": "assistant", "content": "four"}
    assert choice["finish_reason"] == "stop"
    assert [one["token"] for one in choice["logprobs"]["content"]] == ["f", "o", "u", "r", "<|im_end|>"]
    assert [one["logprob"] for one in choice["logprobs"]["content"]] == whole["token_logprobs"]
    assert whole["token_ids"] == drawn and whole["prompt_token_ids"] == before
    assert whole["weight_versions"] == [5] * 5 and whole["weight_version"] == 5
    assert whole["usage"] == {"prompt_tokens": len(before), "completion_tokens": 5, "total_tokens": len(before) + 5}
    assert text == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    assert rollout.arrays["tokens"].tolist() == drawn
    assert rollout.exchanges[0].reward == 0.5


def test_prompt_tokens_can_be_left_out():
    async def play():
        async with playing("four") as (client, [row], *_):
            return (await chat(client, row, return_token_ids=False)).json()

    assert "prompt_token_ids" not in asyncio.run(play())


def test_a_stream_has_the_parts_of_the_whole():
    async def play():
        async with playing('so call add {"x": 1}') as (client, [row], *_):
            return await chat(client, row, stream=True, stream_options={"include_usage": True}, tools=[ADD])

    *chunks, last = events_of(asyncio.run(play()))
    assert last is None
    first, called, ended, used = chunks
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": "so "}
    [call] = called["choices"][0]["delta"]["tool_calls"]
    assert call["index"] == 0 and json.loads(call["function"]["arguments"]) == {"x": 1}
    assert ended["choices"][0]["finish_reason"] == "tool_calls"
    assert len(ended["token_ids"]) == used["usage"]["completion_tokens"]
    assert len({chunk["id"] for chunk in chunks}) == 1


def test_a_response_is_continued_by_its_items_and_by_its_id():
    async def play():
        async with playing('call add {"x": 1}', "5", "6") as (client, [row], engine, _service, group):
            headers = bearer(row["api_key"])
            tool = {"type": "function", "name": "add", "parameters": {}, "strict": True}
            asked = {"input": "go", "instructions": "be brief", "tools": [tool]}
            first = (await client.post("/v1/responses", json=asked, headers=headers)).json()
            [call] = first["output"]
            answer = {"type": "function_call_output", "call_id": call["call_id"], "output": "5"}
            asked["input"] = [{"role": "user", "content": "go"}, call, answer]
            second = (await client.post("/v1/responses", json=asked, headers=headers)).json()
            third = {**asked, "input": "again", "previous_response_id": second["id"], "stream": True}
            events = events_of(await client.post("/v1/responses", json=third, headers=headers))
            await done(client, row, reward=1)
            return call, second, events, engine, await group

    call, second, events, engine, (_, [rollout]) = asyncio.run(play())
    assert (call["type"], call["name"], json.loads(call["arguments"])) == ("function_call", "add", {"x": 1})
    assert second["output"][0]["content"][0]["text"] == "5"
    assert events[-1]["type"] == "response.completed"
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert "response.output_text.delta" in [event["type"] for event in events]
    assert "branch_lengths" not in rollout.arrays
    for before, after in zip(engine.drawn, engine.drawn[1:]):
        assert after[0][: len(before[0]) + len(before[1])] == [*before[0], *before[1]]


def test_an_answer_that_is_cut_says_so():
    async def play():
        async with playing("a long answer", "another one") as (client, [row], *_):
            whole = (await chat(client, row, max_tokens=3)).json()
            asked = {"input": "go", "max_output_tokens": 3}
            response = (await client.post("/v1/responses", json=asked, headers=bearer(row["api_key"]))).json()
            return whole, response

    whole, response = asyncio.run(play())
    assert whole["choices"][0]["finish_reason"] == "length" and len(whole["token_ids"]) == 3
    assert (response["status"], response["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})


def test_sampling_is_the_recipe_s_and_the_client_learns_it():
    async def play():
        async with playing("a", "b") as (client, [row], _engine, service, _):
            other = {"temperature": 0, "seed": 3, "tool_choice": "required", "response_format": {"type": "json_object"}}
            both = [
                await chat(client, row, temperature=1.0, top_p=1),
                await chat(client, row, **other),
            ]
            return [reply.headers.get("x-ignored-parameters") for reply in both], service.log

    headers, log = asyncio.run(play())
    assert headers == [None, "temperature, seed, tool_choice, response_format"]
    assert any("temperature" in line for line in log)


def test_a_session_is_named_by_a_header_beside_the_token():
    async def play():
        async with playing("hi") as (client, [row], _, service, group):
            headers = service.headers(**{"x-rollout": row["id"]})
            body = {"model": "any", "messages": HELLO}
            assert (await client.post("/v1/chat/completions", json=body, headers=headers)).status_code == 200
            without = await client.post("/v1/chat/completions", json=body, headers=service.headers())
            assert (await client.get("/v1/models", headers=headers)).json()["data"][0]["id"] == "tiny"
            await client.post(row["done_url"], json={"reward": 1}, headers=service.headers())
            return error_of(without), await group

    refused, (_, rollouts) = asyncio.run(play())
    assert refused[:2] == (400, "no_rollout")
    assert len(rollouts) == 1


WRONG = {
    "no JSON": (b"{", 400, "not JSON"),
    "no object": (b"[]", 400, "send a JSON object"),
    "no messages": (b'{"messages": []}', 400, "send at least one"),
    "no field": (b"{}", 400, "missing required field `messages`"),
    "a wrong role": (b'{"messages": [{"role": "robot", "content": "x"}]}', 400, "'robot'"),
    "a wrong content": (b'{"messages": [{"role": "user", "content": 3}]}', 400, r"\$.messages\[0\].content"),
    "a picture": (
        b'{"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}',
        400,
        "'image_url'; only text is read",
    ),
    "nothing to answer": (b'{"messages": [{"role": "assistant", "content": "x"}]}', 400, "the assistant's"),
    "an answer to no call": (
        b'{"messages": [{"role": "tool", "content": "x", "tool_call_id": "c"}]}',
        400,
        "no message before it makes",
    ),
    "wrong arguments": (
        b'{"messages": [{"role": "assistant", "tool_calls": [{"id": "c", "function": '
        b'{"name": "f", "arguments": "{"}}]}]}',
        400,
        "the arguments of f are not JSON",
    ),
    "several answers": (b'{"messages": [{"role": "user", "content": "x"}], "n": 2}', 400, "call 2 times"),
    "a stop string": (
        b'{"messages": [{"role": "user", "content": "x"}], "stop": "."}',
        400,
        r"\[rollout.sampling\] stop",
    ),
    "no token": (b'{"messages": [{"role": "user", "content": "x"}], "max_tokens": 0}', 400, "at least one"),
    "too many tokens": (
        b'{"messages": [{"role": "user", "content": "x"}], "max_tokens": 101}',
        400,
        "max_tokens = 101",
    ),
    "another tool": (
        b'{"messages": [{"role": "user", "content": "x"}], "tools": [{"type": "web_search"}]}',
        400,
        "only functions",
    ),
    "a tool without a name": (
        b'{"messages": [{"role": "user", "content": "x"}], "tools": [{"type": "function"}]}',
        400,
        "no name",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_request_is_one_clear_error_and_the_rollout_goes_on(case):
    body, status, message = WRONG[case]

    async def play():
        async with playing("hi") as (client, [row], _, _service, group):
            reply = await client.post("/v1/chat/completions", content=body, headers=bearer(row["api_key"]))
            assert (await chat(client, row)).status_code == 200
            await done(client, row, reward=1)
            await group
            return reply

    reply = asyncio.run(play())
    assert re.search(message, error_of(reply)[2]), error_of(reply)
    assert reply.status_code == status


def test_wrong_responses_are_refused_too():
    async def play():
        async with playing() as (client, [row], *_):
            wrong = [
                {"input": [{"type": "computer_call"}]},
                {"input": "x", "previous_response_id": "resp_of_another"},
                {"input": []},
                {"input": [{"role": "user", "content": [3]}]},
            ]
            replies = [await client.post("/v1/responses", json=body, headers=bearer(row["api_key"])) for body in wrong]
            return [error_of(reply)[:2] for reply in replies]

    assert asyncio.run(play()) == [
        (400, "unsupported_item"),
        (400, "unknown_response"),
        (400, "invalid_request"),
        (400, "invalid_request"),
    ]


def test_keys_tokens_and_routes_that_do_not_fit_are_refused():
    async def play():
        async with playing(num_samples=2) as (client, [row, other], _, service, _group):
            body = {"messages": HELLO}
            route = "/v1/chat/completions"
            replies = {
                "no key": await client.post(route, json=body),
                "unknown key": await client.post(route, json=body, headers=bearer("sk-none")),
                "other rollout": await client.post(
                    route, json=body, headers={**bearer(row["api_key"]), "x-rollout": other["id"]}
                ),
                "end of another": await client.post(
                    f"/rollouts/{other['id']}/done", json={"reward": 1}, headers=bearer(row["api_key"])
                ),
                "row with a key": await client.post("/rollouts", headers=bearer(row["api_key"])),
                "models": await client.get("/v1/models"),
                "route": await client.post("/v1/embeddings", json={}, headers=service.headers()),
                "method": await client.get(route, headers=service.headers()),
                "no row": await client.post("/rollouts", json={"wait_s": 0}, headers=service.headers()),
            }
            return {name: error_of(reply)[0] for name, reply in replies.items()}

    assert asyncio.run(play()) == {
        "no key": 401,
        "unknown key": 401,
        "other rollout": 403,
        "end of another": 403,
        "row with a key": 401,
        "models": 401,
        "route": 404,
        "method": 405,
        "no row": 503,
    }


def test_a_rollout_ends_once_with_a_finite_reward():
    async def play():
        async with playing("hi") as (client, [row], _, _service, group):
            await chat(client, row)
            wrong = [await done(client, row), await done(client, row, reward="one"), await done(client, row, prize=1)]
            assert (await done(client, row, reward=1)).status_code == 200
            await group
            late = [await done(client, row, reward=0), await chat(client, row)]
            return [error_of(reply)[:2] for reply in (*wrong, *late)]

    assert asyncio.run(play()) == [
        (400, "no_reward"),
        (400, "invalid_request"),
        (400, "invalid_request"),
        (409, "rollout_ended"),
        (409, "rollout_ended"),
    ]


def test_an_agent_that_gives_up_drops_its_rollout_with_its_reason():
    async def play():
        async with playing("hi") as (client, [row], _, _service, group):
            await chat(client, row)
            assert (await done(client, row, error="the shop is closed")).json()["status"] == "dropped"
            with pytest.raises(SampleError, match="the agent gave up: the shop is closed"):
                await group

    asyncio.run(play())


def test_a_client_that_vanishes_cancels_what_is_drawn_for_it():
    async def play():
        never = asyncio.Event()
        async with playing(never, "hi") as (client, [row], engine, _service, group):
            for stream in (False, True):
                asking = asyncio.create_task(chat(client, row, stream=stream))
                await engine.drawing.wait()
                asking.cancel()
                await asyncio.gather(asking, return_exceptions=True)
                while engine.cancelled < 1 + stream:
                    await asyncio.sleep(0.01)
                engine.texts.insert(0, never)
                engine.drawing.clear()
            engine.texts.remove(never)
            await chat(client, row)
            await done(client, row, reward=1)
            return engine, (await group)[1][0]

    engine, rollout = asyncio.run(play())
    assert [drawn for _, drawn in engine.drawn] == [rollout.arrays["tokens"].tolist()]


def test_a_retry_of_openai_s_clients_gets_the_first_answer():
    async def play():
        async with playing("one", "two", "three") as (client, [row], _engine, _service, _group):
            replies = [
                await chat(client, row),
                await chat(client, row, headers={"x-stainless-retry-count": "1"}),
                await chat(client, row, headers={"x-request-id": "a"}),
                await chat(client, row, headers={"x-request-id": "a"}),
            ]
            return [reply.json()["choices"][0]["message"]["content"] for reply in replies]

    assert asyncio.run(play()) == ["one", "one", "two", "two"]


def test_an_error_of_the_engine_is_one_of_the_server():
    async def play():
        class Broken(Exception):
            pass

        async with playing() as (client, [row], engine, _service, _group):

            def fail(opening):
                raise Broken("out of order")

            engine.open = fail
            return error_of(await chat(client, row))

    assert asyncio.run(play()) == (500, "engine_failed", "Broken: out of order")


def test_the_token_is_no_part_of_an_answer():
    async def play():
        async with playing() as (_client, [row], _, service, _group):
            return row, service.log

    row, log = asyncio.run(play())
    assert TOKEN not in json.dumps(row) and not any(TOKEN in line for line in log)

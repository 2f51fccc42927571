"""Rollouts of agents: their histories become branches, their ends become rewards, and nothing else does."""

import asyncio
import json
import sys

import numpy as np
import pytest
from scripted_agents import PROMPT, Letters, Scripted, drawn_of, texts_of

from cosmos_rl_core.episodes.agent_config import AgentSection
from cosmos_rl_core.episodes.agent_rollout import AgentCall, AgentRollout, RequestRefused, said
from cosmos_rl_core.episodes.agents import AgentGenerator, endpoint_token
from cosmos_rl_core.errors import SampleError, UserError
from cosmos_rl_core.types import Sampling

SAMPLING = Sampling(max_terms=200)
ADD = {"type": "function", "function": {"name": "add"}}


def user(text):
    return {"role": "user", "content": text}


def rollout_of(engine, **options):
    options = {"sampling": SAMPLING, "seed": 7, **options}
    return AgentRollout(PROMPT, engine=engine, continuation=Letters(), **options)


async def ask(rollout, *messages, **fields):
    return (await rollout.answer(AgentCall(messages=messages, **fields))).turn


async def recorded(rollout, reward=1.0):
    rollout.end(reward)
    assert await rollout.ended() == reward
    text, record = rollout.record()
    rollout.close()
    return text, record


def test_a_history_that_grows_is_one_branch_whose_drawn_terms_are_never_written_again():
    async def play():
        engine = Scripted("hi", "bye")
        rollout = rollout_of(engine)
        turn = await ask(rollout, user("a"))
        await ask(rollout, user("a"), said(turn), user("b"))
        text, record = await recorded(rollout, reward=0.5)
        return engine, text, record

    engine, text, record = asyncio.run(play())
    assert engine.read == ["<user:a>", "<user:a>hi$\n<user:b>"]
    assert text == "<user:a>"
    assert texts_of(record) == ["<user:a>", "hi$\n<user:b>bye$"]
    assert drawn_of(record) == "hi$bye$"
    assert [each.reward for each in record.exchanges] == [None, 0.5]
    assert list(record.exchanges[0].messages) == [user("b")]
    assert record.rollout_logprobs[record.loss_mask].tolist() == [-1, -2, -3, -1, -2, -3, -4]
    assert record.episode.term_steps.tolist() == [0] * 3 + [1] * 13
    assert engine.open_sessions == 0


def test_a_rewritten_history_is_a_new_branch_of_the_same_rollout():
    async def play():
        rollout = rollout_of(Scripted("hi", "bye"))
        await ask(rollout, user("a"))
        await ask(rollout, user("summary of a"))
        return (await recorded(rollout))[1]

    record = asyncio.run(play())
    assert record.arrays["branch_lengths"].tolist() == [[8, 3], [19, 4]]
    assert drawn_of(record) == "hi$bye$"
    assert [each.branch for each in record.exchanges] == [0, 1]


def test_a_history_that_forks_goes_on_after_the_terms_that_were_drawn():
    """Also where the engine drew what no template would write."""

    async def play():
        engine = Scripted("h i", "one", "two")
        rollout = rollout_of(engine)
        turn = await ask(rollout, user("a"))
        await ask(rollout, user("a"), said(turn), user("b"))
        await ask(rollout, user("a"), said(turn), user("c"))
        return engine, (await recorded(rollout))[1]

    engine, record = asyncio.run(play())
    assert engine.read[2] == "<user:a>h i$\n<user:c>"
    assert drawn_of(record) == "h i$one$two$"
    assert len(record.arrays["branch_lengths"]) == 2


def test_a_turn_that_was_cut_is_followed_by_a_branch():
    async def play():
        engine = Scripted("hi…", "bye")
        rollout = rollout_of(engine)
        turn = await ask(rollout, user("a"))
        await ask(rollout, user("a"), said(turn), user("b"))
        return engine, (await recorded(rollout))[1]

    engine, record = asyncio.run(play())
    assert engine.read[1] == "<user:a<assistant:hi<user:b>"
    assert len(record.arrays["branch_lengths"]) == 2


def test_calls_at_the_same_time_have_a_session_each():
    async def play():
        waits = asyncio.Event()
        engine = Scripted("hi", waits, "two", "one")
        rollout = rollout_of(engine)
        turn = await ask(rollout, user("a"))
        first = asyncio.create_task(ask(rollout, user("a"), said(turn), user("b")))
        await engine.drawing.wait()
        second = await ask(rollout, user("a"), said(turn), user("c"))
        waits.set()
        return engine, second.text, (await first).text, (await recorded(rollout))[1]

    engine, second, first, record = asyncio.run(play())
    assert (second, first) == ("two", "one")
    assert drawn_of(record) == "hi$one$two$"
    assert engine.open_sessions == 0


def test_calls_are_equal_by_their_arguments_and_not_by_their_names_or_spaces():
    async def play():
        engine = Scripted('call add {"x":1, "y":2}', "3")
        rollout = rollout_of(engine)
        turn = await ask(rollout, user("a"), tools=[ADD])
        (call,) = turn.calls
        message = said(turn)
        message["tool_calls"][0] |= {"id": "mine", "function": {"arguments": {"y": 2, "x": 1}, "name": "add"}}
        answer = {"role": "tool", "tool_call_id": "mine", "content": "3"}
        await ask(rollout, user("a"), {**message, "content": None}, answer, tools=[ADD])
        return call, engine, (await recorded(rollout))[1]

    call, engine, record = asyncio.run(play())
    assert len(call.id) == 9 and call.id.isalnum()
    assert engine.read[1] == '[add]<user:a>call add {"x":1, "y":2}$\n<tool:3>'
    assert "branch_lengths" not in record.arrays


def test_other_tools_are_another_history():
    async def play():
        rollout = rollout_of(Scripted("hi", "bye"))
        turn = await ask(rollout, user("a"), tools=[ADD])
        await ask(rollout, user("a"), said(turn), user("b"))
        return (await recorded(rollout))[1]

    assert len(asyncio.run(play()).arrays["branch_lengths"]) == 2


@pytest.mark.parametrize("sign", [{"is_retry": True}, {"request_id": "r1"}])
def test_a_repeated_call_gets_the_answer_of_the_first(sign):
    async def play():
        rollout = rollout_of(Scripted("hi", "other"))
        first = await ask(rollout, user("a"), request_id="r1")
        again = await ask(rollout, user("a"), **sign)
        return first, again, (await recorded(rollout))[1]

    first, again, record = asyncio.run(play())
    assert again is first
    assert drawn_of(record) == "hi$"


def test_a_repeated_call_joins_the_one_that_is_answered_and_survives_its_client():
    async def play():
        waits = asyncio.Event()
        engine = Scripted(waits, "hi")
        rollout = rollout_of(engine)
        first = asyncio.create_task(ask(rollout, user("a")))
        await engine.drawing.wait()
        again = asyncio.create_task(ask(rollout, user("a"), is_retry=True))
        await asyncio.sleep(0)
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        waits.set()
        return (await again).text, (await recorded(rollout))[1]

    text, record = asyncio.run(play())
    assert text == "hi"
    assert drawn_of(record) == "hi$"


def test_the_same_messages_without_a_sign_of_a_retry_are_another_candidate():
    async def play():
        rollout = rollout_of(Scripted("hi", "ho"))
        texts = [(await ask(rollout, user("a"))).text for _ in range(2)]
        return texts, (await recorded(rollout))[1]

    texts, record = asyncio.run(play())
    assert texts == ["hi", "ho"]
    assert drawn_of(record) == "hi$ho$"


def test_what_was_drawn_for_a_client_that_has_gone_is_not_trained():
    async def play():
        engine = Scripted("hi", None, "never", "bye")
        rollout = rollout_of(engine)
        turn = await ask(rollout, user("a"))
        gone = asyncio.create_task(ask(rollout, user("a"), said(turn), user("b")))
        await engine.drawing.wait()
        gone.cancel()
        await asyncio.gather(gone, return_exceptions=True)
        engine.texts.pop(0)
        await ask(rollout, user("a"), said(turn), user("b"), is_retry=True)
        return engine, (await recorded(rollout))[1]

    engine, record = asyncio.run(play())
    assert engine.read[2] == "<user:a>hi$\n<user:b>"
    assert drawn_of(record) == "hi$bye$"
    assert engine.open_sessions == 0


def test_an_end_cancels_calls_and_comes_once():
    async def play():
        engine = Scripted("hi", None)
        rollout = rollout_of(engine)
        await ask(rollout, user("a"))
        late = asyncio.create_task(ask(rollout, user("b")))
        await engine.drawing.wait()
        rollout.end(1.0)
        with pytest.raises(RequestRefused, match="ended before there was an answer") as refused:
            await late
        assert refused.value.status == 409
        with pytest.raises(RequestRefused, match="has ended already; its reward stays"):
            rollout.end(0.0)
        with pytest.raises(RequestRefused, match="has ended; POST /rollouts"):
            await ask(rollout, user("a"))
        return rollout.record()[1]

    assert drawn_of(asyncio.run(play())) == "hi$"


@pytest.mark.parametrize(
    ("limit", "most", "expected"),
    [(None, None, 200), (None, 5, 5), (20, None, 12), (20, 15, 12)],
    ids=["the recipe's", "the client's", "the model's", "the least"],
)
def test_a_turn_has_the_tokens_that_are_left(limit, most, expected):
    async def play():
        engine = Scripted("hi", limit=limit)
        await ask(rollout_of(engine), user("a"), max_terms=most)
        return engine.max_terms

    assert asyncio.run(play()) == [expected]


@pytest.mark.parametrize(
    ("options", "call", "code"),
    [
        ({}, {"max_terms": 201}, "max_tokens_too_large"),
        ({"sampling": Sampling(max_terms=3)}, {}, "context_length_exceeded"),
        ({"limit": 20}, {}, "context_length_exceeded"),
    ],
)
def test_more_tokens_than_there_are_is_an_error_of_the_call_and_not_of_the_rollout(options, call, code):
    async def play():
        limit = options.pop("limit", None) if (options := dict(chosen)) else None
        rollout = rollout_of(Scripted("hi", "bye", limit=limit), **options)
        turn = await ask(rollout, user("a"))
        with pytest.raises(RequestRefused) as refused:
            await ask(rollout, user("a"), said(turn), user("a long question"), **call)
        return refused.value, (await recorded(rollout))[1]

    chosen = options
    refused, record = asyncio.run(play())
    assert (refused.status, refused.code) == (400, code)
    assert drawn_of(record) == "hi$"


def test_branches_count_towards_the_tokens_of_a_rollout():
    async def play():
        engine = Scripted("hi", "bye", "no")
        rollout = rollout_of(engine, sampling=Sampling(max_terms=30))
        await ask(rollout, user("a"))
        await ask(rollout, user("another"))
        with pytest.raises(RequestRefused, match="nothing is left"):
            await ask(rollout, user("a third one"))
        return engine.max_terms

    assert asyncio.run(play()) == [30, 30 - 3 - 14]


def test_messages_that_the_template_refuses_are_an_error_of_the_call():
    async def play():
        with pytest.raises(RequestRefused, match="rows:4: a message has a zero") as refused:
            await ask(rollout_of(Scripted()), user("\x00"))
        return refused.value.status

    assert asyncio.run(play()) == 400


def test_the_same_agent_draws_with_the_same_seeds():
    async def seeds():
        engine, asked = Scripted("hi", "bye"), []
        rollout = rollout_of(engine)
        session = type(engine.open(Letters().open([user("a")])))
        extend = session.extend

        async def noted(self, terms, *, sampling, seed):
            asked.append(seed)
            return await extend(self, terms, sampling=sampling, seed=seed)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(session, "extend", noted)
            turn = await ask(rollout, user("a"))
            await ask(rollout, user("a"), said(turn), user("b"))
        return asked

    first, again = (asyncio.run(seeds()) for _ in range(2))
    assert first == again and len(set(first)) == 2


def test_a_rollout_without_a_turn_is_dropped():
    async def play():
        rollout = rollout_of(Scripted())
        rollout.end(1.0)
        with pytest.raises(SampleError, match="before the model had said anything"):
            rollout.record()

    asyncio.run(play())


@pytest.mark.parametrize("reward", [float("nan"), float("inf")])
def test_a_reward_is_finite(reward):
    async def play():
        rollout = rollout_of(Scripted())
        with pytest.raises(RequestRefused, match="finite"):
            rollout.end(reward)
        assert not rollout.is_over

    asyncio.run(play())


# -- the rollouts of a prompt


def agents_of(engine, *, reports=None, needs_reward=True, **section):
    return AgentGenerator(
        engine,
        Letters(),
        AgentSection.model_validate(section),
        needs_reward=needs_reward,
        report=lambda complaint, detail: (reports if reports is not None else []).append(complaint + detail),
    )


def generating(agents, num_samples=2):
    return asyncio.create_task(agents.generate(PROMPT, num_samples=num_samples, sampling=SAMPLING, seed=3))


async def play_one(agents, reward):
    rollout = await agents.take(wait_s=10)
    await ask(rollout, user("go"))
    rollout.end(reward)
    return rollout


def test_agents_take_the_rollouts_of_a_prompt_and_end_them():
    async def play():
        agents = agents_of(Scripted("hi", "ho"))
        group = generating(agents)
        for reward in (0.25, 0.75):
            assert (await play_one(agents, reward)).prompt is PROMPT
        return await group

    text, rollouts = asyncio.run(play())
    assert text == "<user:go>"
    assert [rollout.exchanges[-1].reward for rollout in rollouts] == [0.25, 0.75]


def test_only_so_many_are_played_at_a_time():
    async def play():
        agents = agents_of(Scripted("hi", "ho"), max_episodes=1)
        group = generating(agents)
        first = await agents.take(wait_s=10)
        assert await agents.take(wait_s=0.05) is None
        await ask(first, user("go"))
        first.end(1.0)
        await play_one(agents, 0.0)
        return await group

    assert len(asyncio.run(play())[1]) == 2


def test_a_rollout_that_nobody_ends_is_dropped_with_its_reason():
    async def play():
        agents = agents_of(Scripted("hi"), timeout_s=0.05, retries=0)
        group = generating(agents, num_samples=1)
        rollout = await agents.take(wait_s=10)
        await ask(rollout, user("go"))
        with pytest.raises(SampleError, match=r"within \[agent\] timeout_s = 0.05 \(1 turns so far\)") as dropped:
            await group
        with pytest.raises(RequestRefused, match="has ended"):
            agents.find(rollout.key)
        return dropped.value.final

    assert asyncio.run(play()) is False


def test_a_rollout_whose_agent_gives_up_is_tried_again():
    async def play():
        agents = agents_of(Scripted("hi"), retries=1)
        group = generating(agents, num_samples=1)
        (await agents.take(wait_s=10)).end(problem="the agent gave up: no network")
        await play_one(agents, 1.0)
        return await group

    assert len(asyncio.run(play())[1]) == 1


def test_a_group_that_fails_ends_the_others_of_the_prompt():
    async def play():
        engine = Scripted("hi")
        agents = agents_of(engine, retries=0)
        group = generating(agents)
        first, second = [await agents.take(wait_s=10) for _ in range(2)]
        await ask(first, user("go"))
        second.end(problem="broken")
        with pytest.raises(SampleError, match="broken"):
            await group
        assert first.is_over
        return engine.open_sessions

    assert asyncio.run(play()) == 0


def test_an_error_of_the_engine_is_raised_to_the_run():
    async def play():
        agents = agents_of(Scripted(RuntimeError("the device is lost")))
        group = generating(agents, num_samples=1)
        with pytest.raises(RuntimeError):
            await ask(await agents.take(wait_s=10), user("go"))
        with pytest.raises(RuntimeError, match="the device is lost"):
            await group

    asyncio.run(play())


def test_keys_are_of_their_rollout_alone():
    async def play():
        agents = agents_of(Scripted())
        group = generating(agents, num_samples=1)
        rollout = await agents.take(wait_s=10)
        assert agents.find(rollout.key) is rollout
        for wrong in ("", "sk-", rollout.key[:-1], "sk-" + rollout.id, "a" * 40):
            with pytest.raises(RequestRefused) as refused:
                agents.find(wrong)
            assert refused.value.status == 401
        group.cancel()
        await asyncio.gather(group, return_exceptions=True)

    asyncio.run(play())
    assert endpoint_token(b"run") != b"run".hex()


def test_the_history_of_another_rollout_is_refused():
    async def play():
        agents = agents_of(Scripted("one", "two", "three"))
        group = generating(agents)
        first, second = [await agents.take(wait_s=10) for _ in range(2)]
        turn = await ask(first, user("go"))
        with pytest.raises(RequestRefused, match="the history of another rollout"):
            await ask(second, user("go"), said(turn), user("on"))
        await ask(second, user("go"))
        first.end(1.0)
        second.end(0.0)
        return [drawn_of(rollout) for rollout in (await group)[1]]

    assert asyncio.run(play()) == ["one$", "two$"]


def test_rows_that_nobody_takes_are_reported(monkeypatch):
    monkeypatch.setattr("cosmos_rl_core.episodes.agents.UNTAKEN_S", 0.0)

    async def play():
        reports = []
        agents = agents_of(Scripted("hi"), reports=reports)
        group = generating(agents, num_samples=1)
        while not reports:
            await asyncio.sleep(0.01)
        await play_one(agents, 1.0)
        await group
        return reports

    assert "rows wait for an agent" in asyncio.run(play())[0]


def test_a_replica_waits_for_agents_unless_one_waits_for_the_engine():
    """Heartbeats have progress while agents think; a call that hangs in the engine has none."""

    async def play():
        engine = Scripted(None)
        agents = agents_of(engine)
        waiting = [agents.is_waiting]
        group = generating(agents, num_samples=1)
        rollout = await agents.take(wait_s=10)
        waiting.append(agents.is_waiting)
        asking = asyncio.create_task(ask(rollout, user("go")))
        await engine.drawing.wait()
        waiting.append(agents.is_waiting)
        for task in (asking, group):
            task.cancel()
        await asyncio.gather(asking, group, return_exceptions=True)
        return waiting

    assert asyncio.run(play()) == [False, True, False]


# -- the command


def run_command(code, *, engine=None, needs_reward=True, drive=None, **section):
    """Play one rollout with a Python program, whose lines of output drive its calls."""

    async def play():
        agents = agents_of(
            engine or Scripted("hi"),
            needs_reward=needs_reward,
            command=[sys.executable, "-c", code],
            **{"retries": 0, **section},
        )
        agents.base_url = "http://127.0.0.1:1/v1"
        group = generating(agents, num_samples=1)
        try:
            if drive is not None:
                while not agents._live:
                    await asyncio.sleep(0.01)
                await drive(next(iter(agents._live.values())))
            return await group
        finally:
            agents.close()

    return asyncio.run(play())


async def one_turn(rollout):
    await ask(rollout, user("go"))


def test_a_command_that_ends_well_ends_its_rollout_where_the_recipe_has_rewards(tmp_path):
    code = f"""
import json, os
with open({str(tmp_path / "seen.json")!r}, "w") as file:
    json.dump({{name: value for name, value in os.environ.items() if name.startswith(("OPENAI", "COSMOS"))}}, file)
import time; time.sleep(0.3)
"""
    _, [rollout] = run_command(code, needs_reward=False, drive=one_turn)
    seen = json.loads((tmp_path / "seen.json").read_text())
    assert rollout.exchanges[-1].reward is None
    assert json.loads(seen["COSMOS_RL_ROW"]) == PROMPT.row
    assert seen["OPENAI_BASE_URL"] == "http://127.0.0.1:1/v1"
    assert seen["COSMOS_RL_DONE_URL"] == f"http://127.0.0.1:1/rollouts/{seen['COSMOS_RL_ROLLOUT']}/done"
    assert seen["OPENAI_API_KEY"].startswith("sk-") and "COSMOS_RL_TOKEN" not in seen


@pytest.mark.parametrize(
    ("code", "needs_reward", "reason"),
    [
        ("pass", True, "gave no reward"),
        ("import sys; print('no model', file=sys.stderr); sys.exit(3)", True, "exit code 3(?s:.*)no model"),
        ("raise ValueError('a bug')", False, "exit code 1(?s:.*)a bug"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", False, "SIGKILL"),
    ],
)
def test_a_command_that_fails_drops_its_rollout_with_the_reason(code, needs_reward, reason):
    with pytest.raises(SampleError, match=reason):
        run_command(code, needs_reward=needs_reward)


def test_a_command_that_takes_too_long_is_killed_with_what_it_started(tmp_path):
    pids = tmp_path / "pids"
    code = f"""
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
open({str(pids)!r}, "w").write(f"{{os.getpid()}} {{child.pid}}")
time.sleep(600)
"""
    with pytest.raises(SampleError, match="timeout_s"):
        run_command(code, timeout_s=3.0)
    from cosmos_rl_core.processes import is_alive

    assert not any(is_alive(int(pid)) for pid in pids.read_text().split())


def test_a_long_row_is_in_a_file(tmp_path, monkeypatch):
    monkeypatch.setattr("cosmos_rl_core.episodes.agent_process.LONGEST_ROW", 4)
    code = f"""
import os, shutil, sys
assert "COSMOS_RL_ROW" not in os.environ
shutil.copy(os.environ["COSMOS_RL_ROW_FILE"], {str(tmp_path / "row.json")!r})
"""
    with pytest.raises(SampleError, match="before the model had said"):
        run_command(code, needs_reward=False)
    assert json.loads((tmp_path / "row.json").read_text()) == PROMPT.row


def test_a_command_that_is_not_installed_is_an_error_at_the_start():
    with pytest.raises(UserError, match="there is no program 'no-such-agent'"):
        agents_of(Scripted(), command=["no-such-agent"])


def test_with_a_command_no_other_agent_takes_rows():
    async def play():
        with pytest.raises(RequestRefused, match="plays all rollouts"):
            await agents_of(Scripted(), command=[sys.executable]).take(wait_s=0)

    asyncio.run(play())


def test_numbers_of_a_rollout_are_numpy():
    async def play():
        rollout = rollout_of(Scripted("hi"))
        await ask(rollout, user("a"))
        return (await recorded(rollout))[1]

    record = asyncio.run(play())
    assert record.versions.dtype == np.int32 and record.rollout_logprobs.dtype == np.float32

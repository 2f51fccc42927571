"""rollouts/step_*.jsonl."""

import asyncio
import json
import math
import threading
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest

from cosmos_rl_core.observe.rollouts import RolloutFiles, write_rollouts
from cosmos_rl_core.types import Exchange, Prompt, Rollout, RolloutGroup, ToolCall


def rollout(versions, **changes):
    num_terms = len(versions)
    fields = dict(
        arrays={},
        rollout_logprobs=np.zeros(num_terms, np.float32),
        versions=np.array(versions, np.int32),
        loss_mask=np.ones(num_terms, bool),
    )
    return Rollout(**(fields | changes))


def group(*rollouts, sample_id=17):
    return RolloutGroup(prompt=Prompt(sample_id=sample_id, row={}), prompt_text="2 + 2 =", rollouts=rollouts)


def test_a_rollout_is_one_line_with_all_a_person_asks_for(tmp_path):
    answer = rollout(
        [4, 4, 5],
        text="四\n",
        reward=1.0,
        reward_breakdown={"exact": 1.0, "format": 0.5},
        advantage=-0.25,
        finish_reason="length",
    )
    path = write_rollouts(tmp_path / "rollouts", step=12, groups=[group(answer)])
    assert path == tmp_path / "rollouts" / "step_000012.jsonl"
    (line,) = path.read_text(encoding="utf-8").splitlines()
    assert "四" in line
    assert json.loads(line) == {
        "sample": 17,
        "prompt": "2 + 2 =",
        "response": "四\n",
        "reward": 1.0,
        "rewards": {"exact": 1.0, "format": 0.5},
        "advantage": -0.25,
        "versions": [4, 5],
        "finish_reason": "length",
        "num_terms": 3,
    }


def test_all_rollouts_of_all_groups_are_written_in_order(tmp_path):
    groups = [group(rollout([1]), rollout([1, 1]), sample_id=3), group(rollout([2]), sample_id=1)]
    path = write_rollouts(tmp_path, step=0, groups=groups)
    written = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(line["sample"], line["num_terms"]) for line in written] == [(3, 1), (3, 2), (1, 1)]


def test_terms_of_the_first_groups_have_text_log_probability_and_version(tmp_path):
    first = rollout([4, 5], rollout_logprobs=np.array([-0.123456, -np.inf], np.float32))
    groups = [group(first, rollout([])), group(rollout([1]), sample_id=1)]
    path = write_rollouts(tmp_path, step=0, groups=groups, term_texts=lambda r: ["a"] * r.num_terms, term_groups=1)
    terms = [json.loads(line).get("terms") for line in path.read_text().splitlines()]
    assert terms == [{"texts": ["a", "a"], "logprobs": [-0.1235, None], "versions": [4, 5]}, None, None]


def test_advantages_and_mask_of_the_terms_are_written_where_they_differ(tmp_path):
    steps = np.array([0, 0, 1])
    episode = SimpleNamespace(advantages=np.array([0.5, -0.25], np.float32), term_steps=steps)
    answer = rollout([1, 1, 1], episode=episode, loss_mask=np.array([False, True, True]))
    path = write_rollouts(tmp_path, step=0, groups=[group(answer)], term_texts=lambda r: ["a"] * 3, term_groups=1)
    terms = json.loads(path.read_text())["terms"]
    assert (terms["advantages"], terms["mask"]) == ([0.5, 0.5, -0.25], [0, 1, 1])


@pytest.mark.parametrize(
    ("count", "shown"), [(0, []), (1, [0]), (4, [0, 1, 3, 4]), (5, [0, 1, 2, 3, 4]), (9, [*range(6)])]
)
def test_terms_are_written_for_the_first_worst_best_and_most_mixed_groups(tmp_path, count, shown):
    rewards = [(0.5, 0.5), (0.1, 0.1), (0.4, 0.5), (0.9, 0.9), (0.0, 1.0), (0.5, 0.6)]
    groups = [group(*(rollout([1], reward=each) for each in pair), sample_id=i) for i, pair in enumerate(rewards)]
    path = write_rollouts(tmp_path, step=0, groups=groups, term_texts=lambda r: ["a"], term_groups=count)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["sample"] for line in lines if "terms" in line][::2] == shown


def test_an_episode_has_its_turns(tmp_path):
    call = ToolCall(name="add", arguments={"value": math.nan, "text": "\ud800"}, id="call-1")
    picture = [{"type": "image_url", "image_url": {"url": "data:image/png;base64,"}}, {"type": "text", "text": "seen"}]
    turns = (
        Exchange(
            text="so",
            reasoning="hm",
            calls=(call,),
            problem="no name",
            messages=({"role": "tool", "name": "add", "content": picture},),
            reward=0.0,
            metrics={"n": math.inf},
            model_s=0.25,
            environment_s=1.00004,
        ),
        Exchange(text="done", branch=1),
    )
    path = write_rollouts(tmp_path, step=0, groups=[group(rollout([1, 1], exchanges=turns), rollout([1]))])
    first, second = [json.loads(line) for line in path.read_text().splitlines()]
    assert first["exchanges"] == [
        {
            "text": "so",
            "reasoning": "hm",
            "calls": [{"name": "add", "arguments": '{"value": NaN, "text": "?"}'}],
            "problem": "no name",
            "messages": [{"role": "tool", "name": "add", "content": "[image_url] seen"}],
            "reward": 0.0,
            "metrics": {"n": None},
            "model_s": 0.25,
            "environment_s": 1.0,
        },
        {"text": "done", "branch": 1, "model_s": 0.0, "environment_s": 0.0},
    ]
    assert "exchanges" not in second


def test_a_prompt_is_written_once_per_group(tmp_path):
    groups = [group(rollout([1]), rollout([1]), sample_id=3), group(rollout([2]), rollout([2]), sample_id=1)]
    path = write_rollouts(tmp_path, step=0, groups=groups)
    prompts = [json.loads(line).get("prompt") for line in path.read_text().splitlines()]
    assert prompts == ["2 + 2 =", None, "2 + 2 =", None]


def test_an_empty_rollout_and_a_number_json_does_not_know_are_written(tmp_path):
    path = write_rollouts(tmp_path, step=1, groups=[group(rollout([], advantage=math.nan))], name="eval")
    assert path.name == "eval_000001.jsonl"
    line = json.loads(path.read_text())
    assert (line["versions"], line["advantage"]) == ([], None)


def test_a_file_is_written_beside_the_computation_and_waited_for(tmp_path):
    go = threading.Event()

    def texts(rollout):
        assert go.wait(10)
        return ["a"]

    files = RolloutFiles(tmp_path, every=2, write=partial(write_rollouts, term_texts=texts, term_groups=1))

    async def scenario():
        files.begin([group(rollout([1]))], 2)
        waiting = asyncio.create_task(files.written())
        await asyncio.sleep(0.05)
        assert not waiting.done()
        go.set()
        await waiting
        assert json.loads((tmp_path / "step_000002.jsonl").read_text())["terms"]["texts"] == ["a"]
        files.begin([group(rollout([1]))], 3)
        await files.written()

    asyncio.run(scenario())
    assert [path.name for path in tmp_path.iterdir()] == ["step_000002.jsonl"]


def test_a_file_that_cannot_be_written_is_an_error_of_its_step(tmp_path):
    (tmp_path / "rollouts").write_text("a file in place of the folder")
    files = RolloutFiles(tmp_path / "rollouts", every=1, write=write_rollouts)
    files.begin([group(rollout([1]))], 0)
    with pytest.raises(FileExistsError):
        asyncio.run(files.written())

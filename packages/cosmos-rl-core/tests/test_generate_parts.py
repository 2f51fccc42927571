"""Generation without a process: the arithmetic of GPUs, the file of rollouts, prompts, and how sure a mean is."""

import json
import math

import pytest
from scipy import stats

from cosmos_rl_core.errors import UserError
from cosmos_rl_core.inference.evaluate import Estimate, estimates, t_quantile
from cosmos_rl_core.inference.prompts import evaluation_prompts, read_prompts
from cosmos_rl_core.inference.request import Instances
from cosmos_rl_core.inference.rollouts_file import RolloutsFile
from cosmos_rl_core.recipe.load import load_config, load_domain

RECIPE = {
    "run": {"domain": "cosmos_rl_core.testing.tiny:TINY", "max_steps": 1},
    "reward": {"functions": [{"name": "hits"}]},
}


# num_gpus = total_shard * tp_size


@pytest.mark.parametrize(
    ("num_gpus", "tp_size", "total_shard"), [(8, 1, 8), (8, 2, 4), (8, 8, 1), (1, 1, 1), (6, 3, 2)]
)
def test_total_shard_follows_from_the_other_two(num_gpus, tp_size, total_shard):
    assert Instances(num_gpus=num_gpus, tp_size=tp_size).total_shard == total_shard


def test_eight_gpus_alone_are_eight_instances():
    assert Instances(num_gpus=8).allot("01234567") == [[number] for number in "01234567"]


def test_an_instance_sees_tp_size_gpus():
    assert Instances(num_gpus=4, tp_size=2).allot(["0", "1", "5", "7", "8"]) == [["0", "1"], ["5", "7"]]


def test_without_gpus_the_numbers_mean_processes():
    assert Instances(num_gpus=4, tp_size=2).allot([]) == [[], []]


@pytest.mark.parametrize(("num_gpus", "tp_size", "take"), [(8, 3, "Use 6"), (1, 2, "Use 2")])
def test_numbers_that_do_not_divide_are_an_error(num_gpus, tp_size, take):
    with pytest.raises(UserError, match=f"--num-gpus {num_gpus} cannot be divided .* --tp-size {tp_size}: .*{take}"):
        Instances(num_gpus=num_gpus, tp_size=tp_size)


@pytest.mark.parametrize("numbers", [{"num_gpus": 0}, {"tp_size": 0}, {"num_gpus": -2}])
def test_numbers_below_one_are_an_error(numbers):
    with pytest.raises(UserError, match="must be at least 1"):
        Instances(**numbers)


def test_more_gpus_than_there_are_is_an_error_that_counts_them():
    with pytest.raises(UserError, match=r"--num-gpus 4: this machine has 2 \(0,1\); use at most 2"):
        Instances(num_gpus=4).allot(["0", "1"])


def test_rows_are_dealt_in_turn():
    assert Instances(num_gpus=3).deal([0, 1, 2, 3, 4]) == [[0, 3], [1, 4], [2]]


# rollouts.jsonl


def opened(tmp_path, *, num_samples=1, request=None, overwrite=False):
    return RolloutsFile.open(tmp_path, request=request or {"seed": 0}, num_samples=num_samples, overwrite=overwrite)


def lines_of(sample, *, num_samples=1):
    return [{"sample": sample, "rollout": place, "response": f"{sample}.{place}"} for place in range(num_samples)]


def test_lines_end_up_in_order_whenever_they_came(tmp_path):
    file = opened(tmp_path, num_samples=2)
    for sample in (2, 0, 1):
        file.add(lines_of(sample, num_samples=2))
    assert file.close() == [line for sample in range(3) for line in lines_of(sample, num_samples=2)]
    on_disk = [json.loads(line) for line in (tmp_path / "rollouts.jsonl").read_text().splitlines()]
    assert [(line["sample"], line["rollout"]) for line in on_disk] == [(s, r) for s in range(3) for r in range(2)]


def test_what_is_whole_is_not_drawn_again(tmp_path):
    file = opened(tmp_path, num_samples=2)
    file.add(lines_of(0, num_samples=2))
    file.add(lines_of(1, num_samples=2)[:1])
    file.add([{"sample": 2, "error": "too long"}])
    file.close()
    with (tmp_path / "rollouts.jsonl").open("a") as cut_off:
        cut_off.write('{"sample": 3, "roll')
    again = opened(tmp_path, num_samples=2)
    assert again.done == {0}
    assert again.close() == lines_of(0, num_samples=2)


@pytest.mark.parametrize(
    "line",
    ["[]", "7", '{"sample": "x"}', '{"rollout": 0}', "9" * 5000, "[" * 5000, '{"sample": NaN}'],
    ids=lambda value: str(value)[:40],
)
def test_a_damaged_line_is_drawn_again(tmp_path, line):
    file = opened(tmp_path)
    file.add(lines_of(0))
    file.close()
    with (tmp_path / "rollouts.jsonl").open("a") as damaged:
        damaged.write(f"{line}\n")
    again = opened(tmp_path)
    assert (again.done, again.close()) == ({0}, lines_of(0))


def test_rollouts_of_another_request_are_not_mixed_in(tmp_path):
    file = opened(tmp_path, request={"seed": 0, "model": "a"})
    file.add(lines_of(0))
    file.close()
    with pytest.raises(UserError, match=r"another request \(other model\). Choose another --out"):
        opened(tmp_path, request={"seed": 0, "model": "b"})
    assert opened(tmp_path, request={"seed": 0, "model": "b"}, overwrite=True).close() == []


def test_a_line_ends_where_json_ends_it(tmp_path):
    line = {"sample": 0, "rollout": 0, "response": "one\u2028two\x85three"}
    file = opened(tmp_path)
    file.add([line])
    file.close()
    again = opened(tmp_path)
    assert (again.done, again.close()) == ({0}, [line])


def test_two_commands_do_not_write_into_one_place(tmp_path):
    file = opened(tmp_path)
    with pytest.raises(UserError, match="is in use by another command"):
        opened(tmp_path)
    file.close()


def test_a_place_that_cannot_be_written_is_a_users_error(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"cannot use .*file/there as --out: Not a directory"):
        opened(tmp_path / "file" / "there")


# Prompts


def prompts(given, **sections):
    config = load_config(RECIPE | sections)
    domain = load_domain(config.run.domain)
    return read_prompts(config, domain, str(given)) if given else evaluation_prompts(config, domain)


def test_a_list_has_a_row_a_line_and_keeps_what_is_wrong(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"context": 3}\n\n{"context"\n7\n"a text"\n{"context": 4}\n')
    found = prompts(path)
    assert [(row.sample, row.columns, row.origin) for row in found.rows] == [
        (0, {"context": 3}, "rows.jsonl:1"),
        (4, {"context": 4}, "rows.jsonl:6"),
    ]
    assert found.wrong.keys() == {1, 2, 3}
    assert "rows.jsonl:3: not valid JSON" in found.wrong[1]
    assert "rows.jsonl:4: a prompt is an object or a text, not a int" in found.wrong[2]
    assert "rows.jsonl:5: the tiny domain takes objects" in found.wrong[3]


def test_a_text_is_a_users_error_where_the_domain_takes_none():
    with pytest.raises(UserError, match="--prompts: the tiny domain takes objects with the columns"):
        prompts("a red cube")


@pytest.mark.parametrize(
    ("name", "content", "message"), [("no.jsonl", None, "No such file"), ("a.txt", "\n", "no prompt")]
)
def test_a_list_without_prompts_is_a_users_error(tmp_path, name, content, message):
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(UserError, match=message):
        prompts(tmp_path / name)


def test_without_prompts_the_rows_are_those_of_the_evaluation():
    found = prompts("", eval={"data": {"rows": 9, "start": 2}, "limit": 2})
    assert [row.columns for row in found.rows] == [{"context": 2}, {"context": 3}]
    with pytest.raises(UserError, match=r"no \[eval.data\]"):
        prompts("")


# How sure a mean is


@pytest.mark.parametrize("df", [1, 2, 3, 4, 7, 30, 1000])
def test_quantiles_of_students_t(df):
    assert t_quantile(df) == pytest.approx(stats.t.ppf(0.975, df), rel=2e-3)


def test_an_estimate_by_hand():
    estimate = Estimate.of([1.0, 2.0, 3.0, 6.0])  # s^2 = 14 / 3
    assert (estimate.mean, estimate.count) == (3.0, 4)
    assert estimate.standard_error == pytest.approx(math.sqrt(14 / 3 / 4))
    low, high = stats.t.interval(0.95, 3, loc=3.0, scale=estimate.standard_error)
    assert (estimate.low, estimate.high) == pytest.approx((low, high), rel=2e-2)


def test_a_single_value_has_no_error():
    assert math.isnan(Estimate.of([0.5]).standard_error)


def test_the_rollouts_of_a_row_count_once():
    rewards = {0: (0.0, 1.0), 1: (1.0, 1.0)}
    lines = [
        {"sample": sample, "rollout": place, "reward": 2 * value, "rewards": {"hits": value}}
        for sample, values in rewards.items()
        for place, value in enumerate(values)
    ]
    found = estimates([*lines, {"sample": 2, "error": "too long"}])
    assert found["reward"] == Estimate.of([1.0, 2.0])
    assert found["reward/hits"] == Estimate.of([0.5, 1.0])
    assert estimates([{"sample": 2, "error": "too long"}]) == {}


def test_a_share_of_successes_has_wilsons_interval():
    # n = 10, 8 successes: (0.8 + z^2/20 -+ z sqrt(0.016 + z^2/400)) / (1 + z^2/10), z = 1.96
    estimate = Estimate.of([1.0] * 8 + [0.0] * 2)
    assert (estimate.low, estimate.high) == (pytest.approx(0.4902, abs=1e-4), pytest.approx(0.9433, abs=1e-4))
    assert Estimate.of([1.0, 1.0, 1.0]).low < 1.0  # three of three say little


def test_rows_are_told_apart_by_their_label():
    lines = [{"sample": i, "reward": float(i), "rewards": {}} for i in range(4)]
    found = estimates(lines, labels={0: ["task=a"], 1: ["task=b"], 2: ["task=a"], 3: ["task=b"]})
    assert {name: metric.mean for name, metric in found.items()} == {
        "reward": 1.5,
        "reward task=a": 1.0,
        "reward task=b": 2.0,
    }

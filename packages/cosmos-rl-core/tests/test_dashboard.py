"""The dashboard's readers of run directories, and its server."""

import asyncio
import contextlib
import json
import shutil
import socket
import time

import httpx
import numpy as np
import pytest
from run_files import write_run
from starlette.testclient import TestClient

from cosmos_rl_core.errors import UserError
from cosmos_rl_core.observe.trace import WAITS
from cosmos_rl_core.ops.dashboard.app import Runs, build_app
from cosmos_rl_core.ops.dashboard.curves import Curves
from cosmos_rl_core.ops.dashboard.guard import Guard
from cosmos_rl_core.ops.dashboard.health import health
from cosmos_rl_core.ops.dashboard.lines import GrowingFile
from cosmos_rl_core.ops.dashboard.rollouts import Rollouts
from cosmos_rl_core.ops.dashboard.run import find_runs, without_secrets
from cosmos_rl_core.ops.dashboard.server import MOST_IDLE, http_server, listen, serve

TOKEN = "a-token-of-a-test"


@pytest.fixture
def run_dir(tmp_path):
    return write_run(tmp_path / "first")


def metrics(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def client(*paths, port=80):
    app = Guard(build_app(Runs(paths)), token=TOKEN, port=port)
    return TestClient(app, base_url="http://127.0.0.1", follow_redirects=True)


@pytest.fixture
def page(run_dir):
    opened = client(run_dir)
    assert opened.get(f"/?token={TOKEN}").status_code == 200
    return opened


# -- files that grow


def test_only_new_whole_lines_are_read(tmp_path):
    path, file = tmp_path / "a.jsonl", GrowingFile(tmp_path / "a.jsonl")
    assert file.new() == []
    path.write_bytes(b"1\n2\n3")
    assert file.new() == [b"1", b"2"]
    with path.open("ab") as out:
        out.write(b"3\n")
    assert file.new() == [b"33"]
    assert not file.restarted


def test_a_file_that_was_replaced_or_cut_is_read_anew(tmp_path):
    path, file = tmp_path / "a.jsonl", GrowingFile(tmp_path / "a.jsonl")
    path.write_bytes(b"1\n2\n3\n")
    file.new()
    (tmp_path / "b").write_bytes(b"1\n9\n8\n7\n")
    (tmp_path / "b").replace(path)
    assert file.new() == [b"1", b"9", b"8", b"7"]
    assert file.restarted
    path.write_bytes(b"5\n")
    assert file.new() == [b"5"]
    assert file.restarted


def test_of_a_large_file_the_end_is_read_from_a_line_on(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b"".join(b"%06d\n" % i for i in range(100)))
    assert GrowingFile(tmp_path / "a.jsonl", most_bytes=20).new() == [b"000098", b"000099"]


# -- curves


def test_points_of_many_steps_are_means_with_their_extremes(tmp_path):
    metrics(tmp_path / "m.jsonl", [{"step": i, "loss": float(i % 10)} for i in range(1000)])
    curves = Curves(tmp_path / "m.jsonl")
    curves.update()
    found = curves.points(axis="step", names=["loss"], most=100)
    assert (found["size"], found["steps"], len(found["x"])) == (10, 1000, 100)
    assert set(found["series"]["loss"]["mean"]) == {4.5}
    assert (set(found["series"]["loss"]["low"]), set(found["series"]["loss"]["high"])) == ({0.0}, {9.0})


def test_few_steps_are_exact_and_gaps_stay_gaps(tmp_path):
    metrics(tmp_path / "m.jsonl", [{"step": 0, "a": 1.0}, {"step": 1, "a": None, "b": 2.0}, {"step": 2, "a": 3.0}])
    curves = Curves(tmp_path / "m.jsonl")
    curves.update()
    found = curves.points(axis="step", names=["a", "b", "c"], most=100)["series"]
    assert found == {"a": {"mean": [1.0, None, 3.0]}, "b": {"mean": [None, 2.0, None]}}


def test_a_resumed_run_goes_on_in_time_and_terms(tmp_path):
    rows = [{"step": i, "time_s": t, "terms": 10.0} for i, t in enumerate([5.0, 10.0, 2.0, 4.0])]
    metrics(tmp_path / "m.jsonl", rows)
    curves = Curves(tmp_path / "m.jsonl")
    curves.update()
    assert curves.axis("time_s").tolist() == [5.0, 10.0, 12.0, 14.0]
    assert curves.axis("terms").tolist() == [10.0, 20.0, 30.0, 40.0]


def test_a_zoomed_window_has_more_detail(tmp_path):
    metrics(tmp_path / "m.jsonl", [{"step": i, "a": float(i)} for i in range(1000)])
    curves = Curves(tmp_path / "m.jsonl")
    curves.update()
    found = curves.points(axis="step", names=["a"], most=100, low=100, high=149)
    assert found["series"]["a"]["mean"] == [float(i) for i in range(100, 150)]


# -- rollouts


def test_groups_are_sorted_filtered_and_paged(run_dir):
    file = Rollouts(run_dir / "rollouts").file("step", 9)  # half of the answers are right
    everything = file.matching(low=-np.inf, high=np.inf, text="")
    found = file.page(keep=everything, sort="file", at=1, count=1)
    assert (found["total_groups"], found["total"], found["of"]) == (3, 12, 12)
    (group,) = found["groups"]
    assert (group["sample"], group["prompt"], group["mean"]) == (1, "1 + 1 =", 0.5)
    assert [rollout["response"] for rollout in group["rollouts"]] == ["2", "2", "<b>2</b>", "<b>3</b>"]
    right = file.matching(low=0.9, high=1.1, text="")
    assert file.page(keep=right, sort="worst", at=0, count=9)["total"] == 6
    assert file.page(keep=file.matching(low=-1, high=2, text="2 + 1"), sort="best", at=0, count=9)["total_groups"] == 1
    histogram = file.histogram()
    assert (histogram["low"], histogram["high"], sum(histogram["bins"])) == (0.0, 1.0, 12)


def test_a_filter_is_a_text_and_no_pattern(page, run_dir):
    rows = [
        {"sample": 0, "prompt": "?", "response": "a" * 100_000 + "!", "reward": 1.0},
        {"sample": 1, "prompt": "?", "response": "Straße (a+)+$", "reward": 1.0},
    ]
    metrics(run_dir / "rollouts" / "step_000050.jsonl", rows)
    for text in ("(A+)+$", "STRASSE"):
        found = page.get("/api/run/first/rollouts", params={"step": 50, "text": text}).json()
        assert [group["sample"] for group in found["groups"]] == [1]


def test_a_prompt_is_followed_through_all_steps(run_dir):
    rollouts = Rollouts(run_dir / "rollouts")
    found = rollouts.through_time("2 + 1 =")
    assert [group["step"] for group in found] == list(range(20))
    assert [rollout["response"] for rollout in found[-1]["rollouts"]] == ["2"] * 4
    (run_dir / "rollouts" / "step_000000.jsonl").unlink()
    assert [group["step"] for group in rollouts.through_time("2 + 1 =")] == list(range(1, 20))
    assert rollouts.through_time("unknown") == []


def test_equal_questions_about_other_pictures_are_other_prompts(page, run_dir):
    rows = [
        {"sample": place, "prompt": "which colour?", "prompt_media": {"image": name}, "response": name, "reward": 1.0}
        for place, name in enumerate(("a.png", "b.png"))
    ]
    metrics(run_dir / "rollouts" / "step_000050.jsonl", rows)
    groups = page.get("/api/run/first/rollouts?step=50").json()["groups"]
    assert [group["prompt_media"] for group in groups] == [{"image": "a.png"}, {"image": "b.png"}]
    (found,) = page.get("/api/run/first/prompt?kind=step&step=50&sample=1").json()
    assert [rollout["response"] for rollout in found["rollouts"]] == ["b.png"]
    assert page.get("/api/run/first/prompt?kind=step&step=50&sample=2").status_code == 404
    assert page.get("/api/run/first/prompt?kind=step&step=51&sample=1").status_code == 404


def test_a_long_prompt_is_followed_through_time(page, run_dir):
    row = {"sample": 3, "prompt": "word " * 50_000, "response": "yes", "reward": 1.0}
    for step in (60, 61):
        metrics(run_dir / "rollouts" / f"step_{step:06d}.jsonl", [row])
    found = page.get("/api/run/first/prompt?step=60&sample=3").json()
    assert [group["step"] for group in found] == [60, 61]


def test_rollouts_of_an_earlier_version_have_their_prompt_in_each_line(tmp_path):
    rows = [{"sample": 1, "prompt": "a", "response": str(i), "reward": 1.0, "num_terms": 1} for i in range(3)]
    (tmp_path / "rollouts").mkdir()
    metrics(tmp_path / "rollouts" / "step_000001.jsonl", rows)
    rollouts = Rollouts(tmp_path / "rollouts")
    assert len(rollouts.file("step", 1).groups) == 1
    assert len(rollouts.through_time("a")) == 1


def test_a_file_that_is_being_written_is_read_up_to_its_last_line(run_dir):
    path = run_dir / "rollouts" / "step_000003.jsonl"
    path.write_bytes(path.read_bytes()[:-20])
    file = Rollouts(run_dir / "rollouts").file("step", 3)
    assert len(file.rewards) == 11
    assert len(file.lines(range(11))) == 11


# -- timeline


def test_a_window_has_lanes_and_shares(run_dir):
    (run,) = find_runs([run_dir]).values()
    run.timeline.update()
    found = run.timeline.window(start=None, length=None, pixels=1000, end=run.now())
    assert [(lane["process"], lane["lane"]) for lane in found["lanes"]] == [
        ("policy-0", "work"),
        ("policy-0", "waits"),
        ("policy-0", "weights"),
        ("rollout-0", "groups in flight"),
        ("rollout-0", "waits"),
        ("rollout-0", "weights"),
    ]
    assert found["full"] == pytest.approx(20 * 1.81)
    assert found["shares"]["policy-0"]["wait for batch"] == pytest.approx(1.0 / 1.81, abs=1e-3)


def test_a_span_that_has_not_ended_lasts_until_the_run_was_last_seen(run_dir):
    at = time.time()
    with (run_dir / "spans" / "policy-0.jsonl").open("a") as file:
        file.write(json.dumps({"name": "wait for batch", "at": at, "track": "waits", "open": True}) + "\n")
    (run,) = find_runs([run_dir]).values()
    run.timeline.update()
    spans = run.timeline.processes(end=at + 4.0)["policy-0"]
    assert spans[-1].dur == pytest.approx(4.0)
    assert json.loads(spans[-1].args) == {"open": True}


def test_a_window_begins_where_the_spans_of_all_processes_are_known(run_dir, monkeypatch):
    size = (run_dir / "spans" / "rollout-0.jsonl").stat().st_size
    monkeypatch.setattr("cosmos_rl_core.ops.dashboard.timeline.MOST_BYTES", size // 2)
    (run_dir / "spans" / "policy-0.jsonl").write_text('{"name":"build","at":1000.0,"dur":1.0}\n')
    (run,) = find_runs([run_dir]).values()
    run.timeline.update()
    found = run.timeline.window(start=None, length=None, pixels=1000, end=run.now())
    assert found["is_cut"]
    assert 0.4 < found["full"] / (20 * 1.81) < 0.6
    assert found["shares"]["policy-0"] == {}


def test_each_version_of_a_link_has_its_bytes_and_delay(run_dir):
    (run,) = find_runs([run_dir]).values()
    run.timeline.update()
    pulls = run.timeline.pulls(end=run.now())
    assert len(pulls) == 20
    assert (pulls[0]["to"], pulls[0]["version"], pulls[0]["bytes"]) == ("rollout-0", 1, 4_000_000)
    assert pulls[0]["delay_s"] == pytest.approx(0.21)
    assert pulls[0]["switch_s"] == pytest.approx(0.01)


# -- health


def curves_of(tmp_path, **series):
    names, columns = list(series), list(series.values())
    rows = [{"step": i, **dict(zip(names, values, strict=True))} for i, values in enumerate(zip(*columns, strict=True))]
    metrics(tmp_path / "m.jsonl", rows)
    curves = Curves(tmp_path / "m.jsonl")
    curves.update()
    return curves


@pytest.mark.parametrize(
    ("series", "text", "key"),
    [
        ({"zero_variance_fraction": 0.9}, "90% of the groups have equal rewards", "filter_zero_variance"),
        ({"truncated_fraction": 0.5}, "50% of the rollouts are cut off", "rollout.sampling"),
        ({"mismatch_kl": 0.2}, "different log-probabilities", "correction"),
        ({"clip_fraction": 0.5}, "50% of the terms are clipped", "learning_rate"),
    ],
    ids=["equal", "cut-off", "mismatch", "clipped"],
)
def test_trouble_is_named_with_the_key_that_changes_it(tmp_path, series, text, key):
    curves = curves_of(tmp_path, **{name: [value] * 12 for name, value in series.items()})
    (found,) = health(curves, status={}, outcome={}, live=True)
    assert text in found.text
    assert key in found.key


@pytest.mark.parametrize(
    ("shares", "text", "key"),
    [
        ({"wait for batch": 0.6, "wait for commit": 0.1}, "policy waits 70% of the time", "rollout.replicas"),
        ({"wait for batch": 0.9, "score": 1.0, "generate": 0.1}, "the rewards are the bottleneck", "reward.functions"),
        ({"wait for leases": 0.6}, "training is the bottleneck", "policy.replicas"),
        ({"wait for batch": 0.4, "wait for leases": 0.4}, "they take turns", "sync.max_staleness"),
    ],
    ids=["generation", "rewards", "training", "turns"],
)
def test_waits_are_those_of_the_spans(tmp_path, shares, text, key):
    idle = {"policy_idle_fraction": [0.0] * 12, "rollout_idle_fraction": [1.0] * 12}  # of heartbeats, before the wait
    (found,) = health(curves_of(tmp_path, **idle), status={}, outcome={}, live=True, shares=shares)
    assert text in found.text
    assert key in found.key


def test_an_environment_that_takes_longer_than_the_model_is_the_bottleneck(tmp_path):
    curves = curves_of(tmp_path, episode_environment_s=[3.25] * 12, episode_model_s=[0.5] * 12)
    (found,) = health(curves, status={}, outcome={}, live=True, shares={"wait for batch": 0.6})
    assert "environment is the bottleneck, an episode waits 3.2 s for it and 0.5 s for the model" in found.text
    assert "environment.max_episodes" in found.key


def test_a_wait_has_one_duration_on_all_pages(page, run_dir):
    began = time.time() - 200.0
    lines = [
        {"name": "wait for batch", "at": began, "dur": 10.0, "track": WAITS},
        {"name": "forward_backward", "at": began + 10, "dur": 50.0},
        {"name": "wait for batch", "at": began + 60, "track": WAITS, "open": True},
    ]
    shutil.rmtree(run_dir / "spans")
    (run_dir / "spans").mkdir()
    metrics(run_dir / "spans" / "policy-0.jsonl", lines)
    (run_dir / "outcome.json").unlink()
    (run_dir / "status.json").write_text(json.dumps({"time": began + 200.0, "phase": "training", "step": 20}))
    (waiting,) = page.get("/api/run/first/members").json()["waiting"]
    assert (waiting["process"], waiting["wait"]) == ("policy-0", "wait for batch")
    assert (waiting["now_s"], waiting["total_s"], waiting["share"]) == (140.0, 150.0, 0.75)
    window = page.get("/api/run/first/timeline").json()
    assert window["shares"]["policy-0"]["wait for batch"] == 0.75
    texts = [finding["text"] for finding in page.get("/api/run/first/overview").json()["health"]]
    assert (
        "The policy waits 100% of the time, the rollouts 0%: generation is the bottleneck." in texts
    )  # the last minute


@pytest.mark.parametrize("first", [1, 6])
def test_rewards_that_stop_to_differ_and_fall_are_weights_that_diverged(tmp_path, first):
    equal, rewards = [0.0] * first + [1.0] * 12, [0.6] * first + [0.0] * 12
    gradients = [0.5] * first + [900.0] * 12
    curves = curves_of(tmp_path, zero_variance_fraction=equal, reward_mean=rewards, grad_norm=gradients)
    recipe = {"policy": {"optimizer": {"learning_rate": 0.5}}}
    found = health(curves, status={}, outcome={}, live=True, recipe=recipe)
    assert found[0].text == (
        f"Since step {first} all rewards of a group are equal, and their mean fell from 0.6 to 0; "
        "the gradient norm was 0.5 at first and at most 900: the weights diverged."
    )
    assert found[0].key == "policy.optimizer.learning_rate = 0.5: a smaller one; policy.max_grad_norm"
    assert not any("harder prompts" in finding.key for finding in found)


def test_rewards_that_are_equal_since_all_are_right_have_not_diverged(tmp_path):
    curves = curves_of(tmp_path, zero_variance_fraction=[0.0] * 6 + [1.0] * 12, reward_mean=[0.5] * 6 + [1.0] * 12)
    assert not any("diverged" in finding.text for finding in health(curves, status={}, outcome={}, live=True))


def test_sentences_about_robot_policies_have_their_keys_and_compare_no_single_rollouts(tmp_path):
    curves = curves_of(tmp_path, truncated_fraction=[0.5] * 12, zero_variance_fraction=[1.0] * 12)
    recipe = {"run": {"domain": "vla"}, "rollout": {"group_size": 1}}
    (found,) = health(curves, status={}, outcome={}, live=True, recipe=recipe)
    assert found.key == "rollout.sampling.max_steps"
    found = health(curves, status={}, outcome={}, live=True, recipe={"run": {"domain": "llm"}})
    assert [finding.key for finding in found][1:] == ["rollout.sampling.max_tokens"]


def test_a_reward_that_fell_in_a_few_steps_is_no_warning(tmp_path):
    curves = curves_of(tmp_path, reward_mean=[0.5, 0.4, 0.3])
    assert health(curves, status={}, outcome={}, live=True) == []


def test_skipped_steps_are_named(tmp_path):
    curves = curves_of(tmp_path, grad_norm=[1.0] * 10 + [None] * 3)
    (found,) = health(curves, status={}, outcome={}, live=True)
    assert (found.level, found.text[:33]) == ("bad", "3 of the last 10 steps were skipp")


def test_a_healthy_run_has_no_trouble(tmp_path):
    curves = curves_of(tmp_path, reward_mean=[0.1 * i for i in range(12)], policy_idle_fraction=[0.1] * 12)
    (found,) = health(curves, status={"members": []}, outcome={}, live=True)
    assert (found.level, found.text) == ("good", "Reward rose from 0.25 to 0.85 in 12 steps.")


def test_a_fallen_entropy_and_a_silent_worker_are_named(tmp_path):
    curves = curves_of(tmp_path, entropy=[1.0] * 15 + [0.01] * 15)
    member = {"name": "rollout-3", "state": "ready", "age_s": 99.0}
    found = health(curves, status={"members": [member]}, outcome={}, live=True)
    assert [finding.level for finding in found] == ["bad", "warn"]
    assert found[0].text == "rollout-3 (ready) sent its last heartbeat 99 s ago."
    assert "Entropy fell from 1 to 0.01" in found[1].text


def test_the_end_of_a_run_is_the_first_sentence(tmp_path):
    curves = curves_of(tmp_path, reward_mean=[0.0, 1.0])
    outcome = {"state": "failed", "message": "no room", "worker": "policy-0", "step": 7, "resume": "cosmos-rl run x"}
    found = health(curves, status={}, outcome=outcome, live=False)
    assert found[0].text == "The run failed in policy-0 after 7 steps: no room. Continue: cosmos-rl run x"
    (gone, *_) = health(curves, status={"phase": "training"}, outcome={}, live=False, resume="cosmos-rl run x")
    assert gone.text == "The controller is gone; its last phase was 'training'. Continue: cosmos-rl run x"
    status = {"phase": "training", "life": "elsewhere"}
    (elsewhere, *_) = health(curves, status=status, outcome={}, live=False)
    assert (elsewhere.level, "It is not known whether the run, on another machine" in elsewhere.text) == ("warn", True)


# -- the server


def test_every_view_answers_for_a_run_and_for_an_empty_directory(page, run_dir, tmp_path):
    empty = tmp_path / "empty"
    empty.mkdir()
    (empty / "resolved.toml").write_text("[run]\n")
    other = client(empty)
    other.get(f"/?token={TOKEN}")
    for view in ("overview", "curves", "rollouts/files", "timeline", "members", "weights", "media", "recipe", "logs"):
        assert page.get(f"/api/run/first/{view}").status_code == 200, view
        assert other.get(f"/api/run/empty/{view}").status_code == 200, view
    assert page.get("/api/run/first/rollouts?step=3").json()["of"] == 12
    assert page.get("/api/run/first/rollouts?step=999").status_code == 404
    assert page.get("/api/run/other/overview").status_code == 404
    (listed,) = page.get("/api/runs").json()
    assert (listed["steps"], listed["life"], listed["held_out"]) == (20, "done", [0.1, 0.9])


@pytest.mark.parametrize(
    "query",
    ["rollouts?sort=x", "rollouts?step=-1", "curves?points=0", "curves?axis=x", "timeline?start=x"],
)
def test_a_wrong_request_is_refused_with_the_reason(page, query):
    answer = page.get(f"/api/run/first/{query}")
    assert answer.status_code == 400
    assert answer.text


def test_without_the_token_nothing_is_served(run_dir):
    stranger = client(run_dir)
    for path in ("/", "/api/runs", "/static/app.js", "/?token=wrong", "/api/run/first/logs", "/?token=%ff"):
        assert stranger.get(path).status_code == 401, path
    assert stranger.get("/", headers={"cookie": f"cosmos_rl_81={TOKEN}"}).status_code == 401
    assert stranger.get("/", headers={"cookie": f"cosmos_rl_80={TOKEN}"}).status_code == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "[::1].evil.example", "[::1", "[::1]x:80", "127.0.0.1:80.evil.example", "localhost:", ""]
)
def test_another_host_name_is_refused_even_with_the_token(page, host):
    assert page.get("/api/runs", headers={"host": host}).status_code == 403


@pytest.mark.parametrize("host", ["localhost", "LocalHost:80", "127.0.0.1:7861", "[::1]", "[::1]:80"])
def test_each_name_of_this_machine_is_served(page, host):
    assert page.get("/api/runs", headers={"host": host}).status_code == 200


def test_half_requests_are_few_at_a_time_and_the_page_is_served_beside_them(run_dir):
    async def main():
        with listen("127.0.0.1", 0) as listener, contextlib.ExitStack() as opened:
            said = []
            app = Guard(build_app(Runs([run_dir])), token=TOKEN, port=80)
            server = http_server(app, log=said.append, over=asyncio.Event())
            running = asyncio.create_task(server.serve(sockets=[listener]))
            address = listener.getsockname()
            for _ in range(2 * MOST_IDLE):
                half = opened.enter_context(socket.socket())
                half.setblocking(False)
                await asyncio.get_running_loop().sock_connect(half, address)
                await asyncio.get_running_loop().sock_sendall(half, b"GET / HT")
            async with httpx.AsyncClient(trust_env=False, timeout=30) as stranger:
                answer = await stranger.get(f"http://127.0.0.1:{address[1]}/api/runs")
            assert answer.status_code == 401
            assert len(server.server_state.connections) <= MOST_IDLE + 1
            server.should_exit = True
            await running
            assert said == [f"more than {MOST_IDLE} idle connections: the oldest are closed"]

    asyncio.run(main())


def test_an_open_page_does_not_delay_the_end_and_leaves_no_error(run_dir, caplog):
    async def main():
        with listen("127.0.0.1", 0) as listener:
            over = asyncio.Event()
            app = Guard(build_app(Runs([run_dir]), over=over), token=TOKEN, port=80)
            server = http_server(app, log=lambda text: None, over=over)
            running = asyncio.create_task(server.serve(sockets=[listener]))
            url = f"http://127.0.0.1:{listener.getsockname()[1]}/api/run/first/live"
            cookies = {"cosmos_rl_80": TOKEN}
            async with (
                httpx.AsyncClient(trust_env=False, timeout=30, cookies=cookies) as browser,
                browser.stream("GET", url) as events,
            ):
                lines = events.aiter_lines()
                assert await anext(lines) == "event: change"
                server.should_exit = True
                rest = [line async for line in lines]  # the stream ends
            assert rest[0].startswith("data: ")
            await running

    asyncio.run(main())
    assert caplog.messages == []


def test_only_reading_is_allowed_and_foreign_scripts_are_not(page):
    assert page.post("/api/runs").status_code == 405
    policy = page.get("/").headers["content-security-policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy


@pytest.mark.parametrize("name", ["..%2ftoken", "%2e%2e/token", "..%2f..%2fother", "%2fetc%2fpasswd", "link.png"])
def test_files_outside_of_media_are_not_served(page, run_dir, name):
    (run_dir / "token").write_text("secret")
    (run_dir / "media").mkdir()
    (run_dir / "media" / "link.png").symlink_to(run_dir / "token")
    assert page.get(f"/api/run/first/media/{name}").status_code == 404


def test_secrets_of_the_recipe_are_not_shown(page):
    assert page.get("/api/run/first/recipe").json()["tracker"] == {"api_key": "***"}
    assert without_secrets({"a": [{"reward_token": "x"}], "max_tokens": 3}) == {
        "a": [{"reward_token": "***"}],
        "max_tokens": 3,
    }


def test_a_copied_directory_shows_the_same(page, run_dir, tmp_path):
    copied = client(shutil.copytree(run_dir, tmp_path / "elsewhere" / "first"))
    copied.get(f"/?token={TOKEN}")
    for view in ("curves", "timeline", "rollouts?step=3"):
        assert copied.get(f"/api/run/first/{view}").json() == page.get(f"/api/run/first/{view}").json()


def test_numbers_that_json_lacks_are_null(page, run_dir):
    with (run_dir / "eval.jsonl").open("a") as file:
        file.write('{"step": 21, "policy_version": 21, "eval/loss": 1e999}\n')
    assert page.get("/api/run/first/overview").json()["evaluations"][0]["eval/reward_mean"] == 0.1


def test_runs_are_found_two_folders_down_and_once(tmp_path):
    write_run(tmp_path / "a" / "run", steps=1)
    write_run(tmp_path / "b" / "run", steps=1)
    write_run(tmp_path / "c" / "run", steps=1)
    found = find_runs([tmp_path, tmp_path / "a"])
    assert list(found) == ["run", "b-run", "c-run"]
    write_run(tmp_path / "a" / "b-run", steps=1)
    again = find_runs([tmp_path], found)
    assert {name: run.path.relative_to(tmp_path).as_posix() for name, run in again.items()} == {
        "run": "a/run",
        "b-run": "b/run",
        "c-run": "c/run",
        "a-b-run": "a/b-run",
    }
    with pytest.raises(UserError, match="no such directory"):
        find_runs([tmp_path / "none"])


def test_a_page_for_all_addresses_is_served_under_each_and_under_no_foreign_name(run_dir):
    app = Guard(build_app(Runs([run_dir])), token=TOKEN, any_address=True, port=80)
    opened = TestClient(app, base_url="http://10.1.2.3:80", follow_redirects=True)
    assert opened.get(f"/?token={TOKEN}").status_code == 200
    for host, code in (("10.1.2.3", 200), ("10.1.2.3:80", 200), ("[fe80::1]:80", 200), ("evil.example", 403)):
        assert opened.get("/api/runs", headers={"host": host}).status_code == code


def test_logs_of_the_launch_are_among_the_logs(page, run_dir):
    (run_dir / "launch").mkdir()
    (run_dir / "launch" / "controller.log").write_text("a controller\n")
    last = page.get("/api/run/first/logs").json()[-1]
    assert (last["name"], last["text"]) == ("launch/controller.log", "a controller\n")


def test_a_host_that_others_reach_needs_a_token_file(tmp_path):
    with pytest.raises(UserError, match="--token-file"):
        serve([tmp_path], host="0.0.0.0", port=0)
    (tmp_path / "short").write_text("abc")
    with pytest.raises(UserError, match="at least 16"):
        serve([tmp_path], host="127.0.0.1", port=0, token_file=tmp_path / "short")


def test_a_port_that_is_taken_is_named_and_the_default_gives_way():
    taken = listen("127.0.0.1", 0)
    with taken, pytest.raises(UserError, match="choose another --port"):
        listen("127.0.0.1", taken.getsockname()[1])
    with listen("127.0.0.1", None), listen("127.0.0.1", None) as second:
        assert second.getsockname()[1]

"""The reward service over HTTP: a real server on loopback with real worker processes."""

from __future__ import annotations

import asyncio
import io
import json
import os
import socket
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import httpx
import msgspec
import numpy as np
import pytest

from cosmos_rl_core.ops.reward_service.server import open_server
from cosmos_rl_core.ops.reward_service.settings import load_settings
from cosmos_rl_core.reward.request import GroupSpec, Header, RewardSpec, encode_body

TOKEN = "correct-horse"
REWARDS = '''
def brightness(group):
    return [float(rollout.media["video"].mean()) / 255 for rollout in group.rollouts]

def parts(group):
    sizes = [float(len(rollout.text)) for rollout in group.rollouts]
    return {"long": sizes, "short": [-size for size in sizes]}

def pixels(group):
    for rollout in group.rollouts:
        rollout.media["image"][:] += 1  # a reward may write into its arrays
    return [rollout.media["image"].max() for rollout in group.rollouts]

async def latent(group):
    return [float(rollout.media["latent"].sum()) + len(group.prompt.row["caption"]) for rollout in group.rollouts]

def odd(group):
    do = group.prompt.row["do"]
    if do == "raise":
        raise RuntimeError("the model is on fire")
    return {"nan": [1.0, float("nan")], "short": [1.0], "text": "ab", "none": None, "fine": [1.0, 2.0]}[do]

class Batched:
    """The size of the batch each group was scored in."""
    def __init__(self, *, bonus=0):
        self.bonus = bonus
    def score_groups(self, groups):
        for group in groups:
            if "gate" in group.prompt.row:
                open(group.prompt.row["started"], "w").close()
                open(group.prompt.row["gate"]).read()
        return [[len(groups) + self.bonus] * len(group.rollouts) for group in groups]
'''
SERVED = [
    {"name": "my_rewards:brightness", "workers": 2},
    {"name": "my_rewards:parts"},
    {"name": "my_rewards:pixels"},
    {"name": "my_rewards:latent"},
    {"name": "my_rewards:odd"},
    {"name": "my_rewards:Batched", "label": "batch", "batch_size": 4, "request_options": ["bonus"]},
    {"name": "cosmos_rl_core.testing.tiny:TINY:text"},
]


@contextmanager
def running(settings, *, python_path, said=None):
    """Run a server on a thread of its own; yields it."""
    up, loop = threading.Event(), asyncio.new_event_loop()
    servers = []

    async def run():
        say = (said if said is not None else []).append
        async with open_server(load_settings(settings), token=TOKEN, log=say, python_path=python_path) as server:
            servers.append(server)
            up.set()
            await server.stopped()

    thread = threading.Thread(target=lambda: (loop.run_until_complete(run()), loop.close()))
    thread.start()
    assert up.wait(60), "the server did not start"
    try:
        yield servers[0]
    finally:
        loop.call_soon_threadsafe(servers[0].stop)
        thread.join(30)
        assert not thread.is_alive()


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rewards")
    (folder / "my_rewards.py").write_text(REWARDS)
    settings = {"port": 0, "queue_size": 8, "max_body_bytes": 2_000_000, "rewards": SERVED}
    with running(settings, python_path=[str(folder)]) as server:
        yield server


@pytest.fixture
def http(server):
    headers = {"Authorization": f"Bearer {TOKEN}"}
    with httpx.Client(base_url=server.url, headers=headers, trust_env=False, timeout=30) as client:
        yield client


def body(*, reward="brightness", arrays=None, media="none", size=2, options=None, identity="", **group):
    """The bytes of a request for one reward."""
    specs = [RewardSpec(name, options=options or {}) for name in ([reward] if isinstance(reward, str) else reward)]
    header = Header(groups=[GroupSpec(size=size, **group)], rewards=specs, media=media, id=identity)
    encoded = encode_body(header, arrays or {})
    joined = b"".join(encoded.pieces())
    assert len(joined) == encoded.num_bytes
    return joined


def enqueue(http, content):
    response = http.post("/api/reward/enqueue", content=content)
    assert response.status_code == 200, response.text
    return response.json()["uuid"]


def fetch(http, uuid, *, wait_s=20.0):
    return http.post("/api/reward/fetch", json={"uuid": uuid, "wait_s": wait_s})


def score(http, content):
    reply = fetch(http, enqueue(http, content)).json()
    assert reply["status"] == "done", reply
    return reply["scores"]


def failure(http, content):
    reply = fetch(http, enqueue(http, content)).json()
    assert (reply["status"], reply.get("scores")) == ("failed", None)
    return reply["error"]


def clips(*levels):
    return [np.full((3, 4, 5, 3), level, np.uint8) for level in levels]


def npy(metadata, array):
    buffer = io.BytesIO()
    np.save(buffer, array, allow_pickle=True)
    return json.dumps(metadata).encode() + b"\n" + buffer.getvalue()


def gate(tmp_path):
    """Two pipes: a reward that is given them says that it has started, and waits."""
    paths = {name: str(tmp_path / name) for name in ("started", "gate")}
    for path in paths.values():
        os.mkfifo(path)
    return paths


def hold(http, pipes, **keys):
    """Enqueue a request that keeps the worker of `batch` busy until its gate is opened; returns its uuid."""
    uuid = enqueue(http, body(reward="batch", row=pipes, **keys))
    Path(pipes["started"]).read_text()
    return uuid


def open_gate(pipes):
    Path(pipes["gate"]).write_text("")


def test_videos_are_scored(http):
    assert score(http, body(media="video", arrays={"video": clips(0, 51)})) == {"brightness": [0.0, 0.2]}


def test_several_rewards_answer_one_request_and_the_total_is_weighted(http):
    specs = [RewardSpec("brightness", weight=10.0), RewardSpec("parts"), RewardSpec("batch", weight=0.5)]
    group = GroupSpec(size=2, texts=["ab", "abc"])
    encoded = encode_body(Header(groups=[group], rewards=specs, media="video"), {"video": clips(255, 0)})
    reply = fetch(http, enqueue(http, b"".join(encoded.pieces()))).json()
    batch = {"batch": [1.0, 1.0], "parts.long": [2.0, 3.0], "parts.short": [-2.0, -3.0], "brightness": [1.0, 0.0]}
    assert reply["scores"] == batch
    assert reply["total"] == [10.5, 0.5]


def test_texts_alone_are_scored_in_parts(http):
    scores = score(http, body(reward="parts", texts=["a", "abc"]))
    assert scores == {"parts.long": [1.0, 3.0], "parts.short": [-1.0, -3.0]}


def test_an_async_reward_sees_latents_and_the_caption(http):
    latents = [np.full((2, 1, 2, 2), value, np.float16) for value in (0.5, 1.0)]
    content = body(reward="latent", media="latent", arrays={"latent": latents}, row={"caption": "abc"})
    assert score(http, content) == {"latent": [7.0, 11.0]}


def test_a_reward_may_write_into_its_arrays(http):
    images = [np.full((2, 2, 3), level, np.uint8) for level in (1, 9)]
    assert score(http, body(reward="pixels", media="image", arrays={"image": images})) == {"pixels": [2.0, 10.0]}


@pytest.mark.parametrize(
    ("do", "reason"),
    [
        ("raise", "odd raised RuntimeError: the model is on fire"),
        ("nan", "odd returned nan for rollout 1; it must be a finite number"),
        ("short", "odd returned 1 values for 2 rollouts"),
        ("text", "odd returned str; it must return one number per rollout"),
        ("none", "odd returned NoneType; it must return one number per rollout"),
    ],
)
def test_what_is_no_score_fails_with_its_reason(http, do, reason):
    assert failure(http, body(reward="odd", row={"do": do})) == reason


def test_a_failed_request_costs_the_worker_nothing(http):
    failure(http, body(reward="odd", row={"do": "raise"}))
    assert score(http, body(reward="odd", row={"do": "fine"})) == {"odd": [1.0, 2.0]}


def test_requests_that_wait_are_scored_together(http, tmp_path):
    pipes = gate(tmp_path)
    first = hold(http, pipes)
    others = [enqueue(http, body(reward="batch", size=1)) for _ in range(3)]
    open_gate(pipes)
    assert fetch(http, first).json()["scores"] == {"batch": [1.0, 1.0]}
    assert [fetch(http, uuid).json()["scores"] for uuid in others] == [{"batch": [3.0]}] * 3


def test_options_of_a_request_are_taken_where_they_are_allowed(http):
    assert score(http, body(reward="batch", options={"bonus": 5})) == {"batch": [6.0, 6.0]}
    assert score(http, body(reward="batch")) == {"batch": [1.0, 1.0]}
    response = http.post("/api/reward/enqueue", content=body(options={"model": "mine"}))
    assert response.status_code == 422
    assert "option 'model' is not for requests to set; those are: none" in response.text


def test_a_pending_request_answers_202(http, tmp_path):
    pipes = gate(tmp_path)
    uuid = hold(http, pipes)
    pending = fetch(http, uuid, wait_s=0)
    assert (pending.status_code, pending.json()["status"]) == (202, "pending")
    open_gate(pipes)
    assert fetch(http, uuid).status_code == 200


def test_the_same_request_id_is_one_job(http, tmp_path):
    pipes = gate(tmp_path)
    uuid = hold(http, pipes, identity="mine")
    assert enqueue(http, body(reward="batch", row=pipes, identity="mine")) == uuid
    open_gate(pipes)
    assert fetch(http, uuid).json()["id"] == "mine"
    assert enqueue(http, body(reward="batch", row=pipes, identity="mine")) == uuid
    other = http.post("/api/reward/enqueue", content=body(reward="batch", identity="mine"))
    assert other.status_code == 409
    assert "'mine' was used for another request" in other.text


def test_a_full_queue_answers_429_and_drops_nothing(http, tmp_path):
    pipes = gate(tmp_path)
    uuids = [hold(http, pipes), *(enqueue(http, body(reward="batch", size=1)) for _ in range(7))]
    refused = http.post("/api/reward/enqueue", content=body(reward="batch", size=1))
    assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
    open_gate(pipes)
    assert all(fetch(http, uuid).json()["status"] == "done" for uuid in uuids)


@pytest.mark.parametrize("given", [None, "Bearer wrong", "Bearer", TOKEN, f"Basic {TOKEN}", f"Bearer {TOKEN}x"])
@pytest.mark.parametrize("path", ["enqueue", "fetch", "pull", "ping"])
def test_a_wrong_token_is_refused_everywhere(server, given, path):
    headers = {} if given is None else {"Authorization": given}
    response = httpx.post(f"{server.url}/api/reward/{path}", content=b"x", headers=headers, trust_env=False)
    assert response.status_code == 401
    assert TOKEN not in response.text
    assert httpx.get(f"{server.url}/metrics", headers=headers, trust_env=False).status_code == 401


def test_an_oversized_body_answers_413(http):
    response = http.post("/api/reward/enqueue", content=b"x" * 2_000_001)
    assert response.status_code == 413
    assert "max_body_bytes = 2000000" in response.text


def test_a_large_upload_with_a_wrong_token_hears_why(server):
    response = httpx.post(f"{server.url}/api/reward/enqueue", content=b"x" * 30_000_000, trust_env=False)
    assert response.status_code == 401


def test_a_client_that_leaves_in_the_middle_of_its_upload_gives_its_place_back(server, http):
    def num_open():
        lines = dict(line.rsplit(" ", 1) for line in http.get("/metrics").text.splitlines() if line[0] != "#")
        return float(lines["cosmos_rl_reward_requests_open"])

    host, port = server.url.removeprefix("http://").split(":")
    head = (
        f"POST /api/reward/enqueue HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\nContent-Length: 99\r\n\r\n"
    )
    with socket.create_connection((host, int(port))) as leaving:
        leaving.sendall(head.encode() + b"{")
        wait_until(lambda: num_open() == 1)
    wait_until(lambda: num_open() == 0)


def wait_until(condition, *, seconds=20.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def test_a_body_without_a_length_answers_411(http):
    assert http.post("/api/reward/enqueue", content=iter([b"abc"])).status_code == 411


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "the body is empty"),
        (b"no line", "one line of JSON"),
        (b"{\n", "header: "),
        (b'{"groups": [{"size": 1}]}\n', "missing required field `rewards`"),
        (b'{"groups": [{"size": 0}], "rewards": [{"name": "a"}]}\n', "`$.groups[0].size`"),
        (b'{"groups": [{"size": 1}], "rewards": [{"name": "a"}], "medium": 1}\n', "unknown field `medium`"),
        (
            b'{"groups": [{"size": 1}], "rewards": [{"name": "glow"}]}\n',
            "no reward 'glow' is served; known: brightness",
        ),
        (b'{"groups": [{"size": 1}], "rewards": [{"name": "parts"}], "media": "video"}\n', "no array has that name"),
        (b'{"groups": [{"size": 1}], "rewards": [{"name": "parts"}]}\nrubbish', "safetensors"),
        (b'{"groups": [{"size": 99999999999}], "rewards": [{"name": "parts"}]}\n', "99999999999 samples in all"),
        (b'{"groups": [{"size": 1, "row": {"a": ' + b"[" * 100_000 + b"\n", "header: "),
        (b'{"reward_fn": {"a": 1}, "prompts": ' + b"[" * 100_000 + b"\n", "header: "),
        (b'{"reward_fn": {"a": 1}, "prompts": ["x"]}\n', "one .npy file"),
        (b'{"reward_fn": {"a": 0}, "prompts": ["x"]}\n\x93NUMPY', "the .npy header is malformed"),
    ],
)
def test_a_malformed_body_answers_422_and_names_the_field(http, content, said):
    response = http.post("/api/reward/enqueue", content=content)
    assert response.status_code == 422
    assert said in response.json()["error"]


def test_an_unknown_request_answers_404(http):
    assert fetch(http, "0" * 32).status_code == 404
    assert http.post("/api/reward/pull", data={"uuid": "0" * 32}).status_code == 404


def test_a_client_of_cosmos_rl_is_served(http):
    images = np.zeros((2, 4, 4, 3), np.float16)
    images[1] = 0.5
    metadata = {"prompts": ["a cat", "a dog"], "reward_fn": {"pixels": 1.0, "odd": 0.0}, "media_type": "image"}
    uuid = enqueue(http, npy(metadata, images))
    fetch(http, uuid)
    pulled = http.post("/api/reward/pull", data={"uuid": uuid, "type": "pixels"})
    assert pulled.json() == {"scores": {"pixels": [1.0, 129.0]}, "type": "pixels"}
    assert http.post("/api/reward/ping", data={"info_data": "{}"}).json()["message"] == "pong"


def test_a_client_of_cosmos_rl_hears_400_until_it_is_ready_and_500_when_it_failed(http, tmp_path):
    pipes = gate(tmp_path)
    metadata = {"prompts": ["x"], "reward_fn": {"batch": 1.0}, **{name: [path] for name, path in pipes.items()}}
    uuid = enqueue(http, npy(metadata, np.zeros((1, 2, 1, 2, 2), np.float16)))
    Path(pipes["started"]).read_text()
    assert http.post("/api/reward/pull", data={"uuid": uuid, "type": "batch"}).status_code == 400
    open_gate(pipes)
    fetch(http, uuid)
    assert http.post("/api/reward/pull", data={"uuid": uuid, "type": "batch"}).json()["scores"] == {"batch": [1.0]}
    failing = {"prompts": ["x"], "reward_fn": {"odd": 1.0}, "do": ["raise"]}
    uuid = enqueue(http, npy(failing, np.zeros((1, 2, 1, 2, 2), np.float16)))
    fetch(http, uuid)
    pulled = http.post("/api/reward/pull", data={"uuid": uuid, "type": "odd"})
    assert (pulled.status_code, pulled.json()["message"]) == (500, "odd raised RuntimeError: the model is on fire")


class Trap:
    """Unpickling this would make a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (self.path, "w")


def test_a_pickled_array_is_refused_and_never_opened(http, tmp_path):
    trap = np.array([Trap(str(tmp_path / "sprung"))], dtype=object)
    content = npy({"prompts": ["x"], "reward_fn": {"batch": 1.0}}, trap)
    response = http.post("/api/reward/enqueue", content=content)
    assert response.status_code == 422
    assert "Python objects" in response.text
    assert not (tmp_path / "sprung").exists()


def test_a_domains_reward_is_served_by_its_name(http):
    assert failure(http, body(reward="text")) == "text returned 'good' for rollout 0; it must be a finite number"


def test_metrics_count_by_reward(http, server):
    assert httpx.get(f"{server.url}/metrics", trust_env=False).status_code == 401
    failure(http, body(reward="odd", row={"do": "raise"}))
    lines = dict(line.rsplit(" ", 1) for line in http.get("/metrics").text.splitlines() if not line.startswith("#"))
    name = "cosmos_rl_reward"
    assert float(lines[f'{name}_failures_total{{reward="odd"}}']) >= 1
    assert float(lines[f'{name}_workers{{reward="brightness"}}']) == 2
    assert float(lines[f'{name}_queue_depth{{reward="odd"}}']) == 0
    assert float(lines[f"{name}_requests_open"]) == float(lines[f"{name}_open_bytes"]) == 0
    counted = float(lines[f'{name}_requests_total{{reward="odd"}}'])
    assert float(lines[f'{name}_seconds_bucket{{le="+Inf",reward="odd"}}']) == counted
    assert float(lines[f'{name}_http_answers_total{{status="401"}}']) >= 1


def test_health_needs_no_token(server):
    assert httpx.get(f"{server.url}/health", trust_env=False).json() == {"status": "ok", "down": []}


def test_a_header_round_trips():
    header = Header(groups=[GroupSpec(size=2, row={"caption": "x\ny"})], rewards=[RewardSpec("a")], id="7")
    line = body(reward="a", row={"caption": "x\ny"}, identity="7")
    assert line.endswith(b"\n") and line.count(b"\n") == 1 and len(line) % 64 == 0
    assert msgspec.json.decode(line, type=Header) == header

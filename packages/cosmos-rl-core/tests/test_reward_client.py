"""The client of a reward service, against services that are dead, slow, busy or lie: never an invented number."""

from __future__ import annotations

import asyncio
import json
import logging
import random
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest

from cosmos_rl_core.assemble import build_reward
from cosmos_rl_core.errors import SampleError, UserError
from cosmos_rl_core.imports import pip_install
from cosmos_rl_core.reward.client import RewardClient, RewardServiceError, ServiceAddress
from cosmos_rl_core.reward.remote import RemoteReward
from cosmos_rl_core.reward.request import GroupSpec, Header, RewardSpec, read_request
from cosmos_rl_core.reward.rubric import Rubric, WeightedReward
from cosmos_rl_core.testing.tiny import TINY
from cosmos_rl_core.types import Prompt, Rollout, RolloutGroup

TOKEN = "correct-horse"
ONE = Header(groups=[GroupSpec(size=2)], rewards=[RewardSpec("glow")], id="mine")
DONE = {"status": "done", "uuid": "u1", "id": "mine", "scores": {"glow": [1.0, 2.0]}}
NAN = '{"status": "done", "uuid": "u1", "id": "mine", "scores": {"glow": [1.0, NaN]}}'


class Service:
    """A service that answers as it is told: in turn from `enqueues` and `fetches`, the last for ever.

    An answer is a body, or (status, body[, headers]). `seen` holds (path, headers, body) of what it was asked.
    """

    def __init__(self, *, enqueues=({"uuid": "u1", "id": "mine"},), fetches=(DONE,)):
        self._answers = {"/enqueue": list(enqueues), "/fetch": list(fetches)}
        self.seen = []
        service = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = self.rfile.read(int(self.headers["Content-Length"]))
                service.seen.append((self.path, dict(self.headers), body))
                status, content, headers = service.answer(self.path, body)
                content = content.encode() if isinstance(content, str) else json.dumps(content).encode()
                self.send_response(status)
                for name, value in {**headers, "Content-Length": len(content)}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *_):
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._http.server_port}"

    def answer(self, path, body):
        answers = self._answers[path]
        found = answers.pop(0) if len(answers) > 1 else answers[0]
        found = found(body) if callable(found) else found
        status, content, *headers = found if isinstance(found, tuple) else (200, found)
        return status, content, headers[0] if headers else {}

    def asked(self, path):
        return [body for seen, _, body in self.seen if seen == path]

    def __enter__(self):
        self._thread = threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._http.shutdown()
        self._thread.join()
        self._http.server_close()


def address(url, *, token=TOKEN):
    return ServiceAddress(enqueue_url=f"{url}/enqueue", fetch_url=f"{url}/fetch", token=token)


def ask(url, *, deadline_s=10.0, wait_s=0.2, header=ONE, arrays=None):
    async def run():
        async with RewardClient(address(url), deadline_s=deadline_s, wait_s=wait_s, rng=random.Random(0)) as client:
            return await client.score(header, arrays or {})

    return asyncio.run(run())


def test_scores_are_fetched_with_the_token():
    with Service() as service:
        assert ask(service.url) == {"glow": [1.0, 2.0]}
    assert {headers["Authorization"] for _, headers, _ in service.seen} == {f"Bearer {TOKEN}"}


def test_what_is_sent_is_what_the_service_reads():
    video = [np.arange(24, dtype=np.uint8).reshape(2, 2, 2, 3)] * 2
    with Service() as service:
        ask(
            service.url,
            header=Header(groups=ONE.groups, rewards=ONE.rewards, media="video", id="mine"),
            arrays={"video": video},
        )
    (body,) = service.asked("/enqueue")
    request = read_request(body)
    assert request.header.id == "mine"
    np.testing.assert_array_equal(request.places["video"].read(body), np.stack(video))


@pytest.mark.parametrize(
    ("reply", "said"),
    [
        (DONE | {"uuid": "u2"}, "fetched request u1, the service returned u2"),
        (DONE | {"id": "yours"}, "sent request id mine, the service returned 'yours'"),
        (DONE | {"scores": {"glow": [1.0]}}, "glow: the service returned 1 scores for 2 samples"),
        (DONE | {"scores": {"glow": []}}, "glow: the service returned 0 scores for 2 samples"),
        (DONE | {"scores": {"glow": [1.0, 2.0, 3.0]}}, "glow: the service returned 3 scores for 2 samples"),
        (DONE | {"scores": {"glow": [1.0, None]}}, "returned an invalid reply"),
        (DONE | {"scores": {"glow": [1.0, "2"]}}, "returned an invalid reply"),
        (DONE | {"scores": {"glow": [1.0, True]}}, "returned an invalid reply"),
        (DONE | {"scores": {"glow": 1.0}}, "returned an invalid reply"),
        (DONE | {"scores": {"other": [1.0, 2.0]}}, "requested glow, the service scored other"),
        (DONE | {"scores": {}}, "requested glow, the service scored nothing"),
        (DONE | {"status": "perhaps"}, "returned an invalid reply"),
        (DONE | {"status": "failed", "error": "glow is broken"}, "glow is broken"),
        (NAN, "returned an invalid reply"),
        (NAN.replace("NaN", "1e999"), "returned an invalid reply"),
        ("<html>welcome</html>", "returned an invalid reply"),
        ("", "returned an invalid reply"),
    ],
)
def test_a_lie_is_no_score(reply, said):
    with Service(fetches=[reply]) as service, pytest.raises(RewardServiceError) as caught:
        ask(service.url)
    assert said in str(caught.value)


@pytest.mark.parametrize("reply", [{"uuid": "u1", "id": "yours"}, {"uuid": "u1"}, {"id": "mine"}, "welcome"])
def test_a_receipt_for_something_else_is_refused(reply):
    with Service(enqueues=[reply]) as service, pytest.raises(RewardServiceError):
        ask(service.url)
    assert not service.asked("/fetch")


@pytest.mark.parametrize("status", [400, 401, 403, 409, 413, 422])
def test_a_refusal_is_final_and_says_why(status):
    with (
        Service(enqueues=[(status, {"error": "not like this"})]) as service,
        pytest.raises(RewardServiceError, match=f"returned {status} .*not like this"),
    ):
        ask(service.url)
    assert len(service.seen) == 1


@pytest.mark.parametrize("status", [408, 429, 500, 502, 503])
def test_what_may_pass_is_tried_again(status):
    receipt = {"uuid": "u1", "id": "mine"}
    with Service(enqueues=[(status, "busy"), (status, "busy"), receipt], fetches=[(status, ""), DONE]) as service:
        assert ask(service.url) == {"glow": [1.0, 2.0]}
    assert len(set(service.asked("/enqueue"))) == 1, "the same request, under the same id"
    assert [path for path, _, _ in service.seen] == ["/enqueue"] * 3 + ["/fetch"] * 2


def test_retry_after_is_respected():
    with (
        Service(enqueues=[(429, "full", {"Retry-After": "30"})]) as service,
        pytest.raises(ConnectionError, match="an attempt failed, the last with: 429 full"),
    ):
        ask(service.url, deadline_s=0.5)
    assert len(service.seen) == 1


def test_a_dead_service_is_a_connection_error_that_says_what_was_waited_for():
    with Service() as service:
        url = service.url
    with pytest.raises(ConnectionError) as caught:
        ask(url, deadline_s=0.5)
    said = str(caught.value)
    assert f"no scores within deadline_s = 0.5; waited for {url}/enqueue to accept the request" in said
    assert "ConnectError" in said and TOKEN not in said


def test_a_slow_service_is_a_timeout_that_says_what_was_waited_for():
    pending = (202, DONE | {"status": "pending", "scores": {}})
    with Service(fetches=[pending]) as service, pytest.raises(TimeoutError) as caught:
        ask(service.url, deadline_s=0.6)
    assert str(caught.value) == f"no scores within deadline_s = 0.6; waited for {service.url}/fetch to score request u1"
    assert 2 <= len(service.asked("/fetch")) <= 6, "a service that does not hold fetches back is not flooded"


def test_a_service_that_was_started_anew_is_sent_the_request_again():
    receipts = [{"uuid": "u1", "id": "mine"}, {"uuid": "u2", "id": "mine"}]
    with Service(enqueues=receipts, fetches=[(404, "who?"), DONE | {"uuid": "u2"}]) as service:
        assert ask(service.url) == {"glow": [1.0, 2.0]}
    first, second = service.asked("/enqueue")
    assert first == second


def test_the_token_goes_to_no_other_address():
    with (
        Service() as other,
        Service(enqueues=[(307, "", {"Location": f"{other.url}/enqueue"})]) as service,
        pytest.raises(RewardServiceError, match="returned 307"),
    ):
        ask(service.url)
    assert not other.seen


def test_the_token_is_in_no_text_of_the_client(caplog):
    caplog.set_level(logging.DEBUG)
    with Service(enqueues=[(401, "wrong token")]) as service, pytest.raises(RewardServiceError) as caught:
        ask(service.url)
    reward = RemoteReward(reward="glow", url=service.url, token=TOKEN)
    shown = [str(caught.value), caplog.text, repr(address(service.url)), repr(reward), reward.model_dump_json()]
    assert not any(TOKEN in text for text in shown)


def group(*levels, row=None, text=""):
    rollouts = tuple(
        Rollout(
            arrays={},
            rollout_logprobs=np.zeros(1, np.float32),
            versions=np.zeros(1, np.int32),
            loss_mask=np.ones(1, np.bool_),
            text=text,
            media={"video": np.full((2, 4, 4, 3), level, np.uint8)},
        )
        for level in levels
    )
    return RolloutGroup(prompt=Prompt(sample_id=3, row=row or {"caption": "a ball"}), rollouts=rollouts)


def levels_of(body):
    """What an honest service answers: the first pixel of each video, as the score of every reward asked for."""
    request = read_request(body)
    values = [float(video[0, 0, 0, 0]) for video in request.places["video"].read(body)]
    scores = {}
    for reward in request.header.rewards:
        scores |= {"parts.a": values, "parts.b": values[::-1]} if reward.name == "parts" else {reward.name: values}
    return request.header.id, scores


class Honest(Service):
    """A service that scores."""

    def __init__(self):
        super().__init__()
        self._ids = {}

    def answer(self, path, body):
        if path == "/enqueue":
            identity, scores = levels_of(body)
            self._ids[f"u-{identity}"] = (identity, scores)
            return 200, {"uuid": f"u-{identity}", "id": identity}, {}
        uuid = json.loads(body)["uuid"]
        identity, scores = self._ids[uuid]
        return 200, {"status": "done", "uuid": uuid, "id": identity, "scores": scores}, {}


def remote(service, reward, **keys):
    urls = {"enqueue_url": f"{service.url}/enqueue", "fetch_url": f"{service.url}/fetch"}
    return RemoteReward(**{"reward": reward, "token": TOKEN, **urls, **keys})


def scored(rewards, scoring, **keys):
    rubric = Rubric([WeightedReward(name=n, weight=w, function=f) for n, w, f in rewards], **keys)
    try:
        return asyncio.run(rubric.score(scoring)).rollouts
    finally:
        rubric.close()


def test_components_of_one_service_share_one_request_a_group():
    with Honest() as service:
        rewards = [("glow", 1.0, remote(service, "glow")), ("b", 0.5, remote(service, "parts.b"))]
        first, second = scored(rewards, group(4, 6))
        assert (first.reward, first.reward_breakdown) == (7.0, {"glow": 4.0, "b": 6.0})
        assert (second.reward, second.reward_breakdown) == (8.0, {"glow": 6.0, "b": 4.0})
        assert len(service.asked("/enqueue")) == 1
        scored(rewards, group(4, 6))
        assert len(service.asked("/enqueue")) == 2, "another group is another request"
    (header, _) = (read_request(body).header for body in service.asked("/enqueue"))
    assert sorted(reward.name for reward in header.rewards) == ["glow", "parts"]


def test_several_rewards_can_be_added_up_in_one():
    with Honest() as service:
        first, second = scored([("sum", 1.0, remote(service, {"glow": 2.0, "parts.b": -1.0}))], group(4, 6))
    assert (first.reward, second.reward) == (2.0, 8.0)


def test_components_with_options_of_their_own_ask_apart():
    with Honest() as service:
        rewards = [("a", 1.0, remote(service, "glow", options={"x": 1})), ("b", 1.0, remote(service, "glow"))]
        scored(rewards, group(1, 2))
    options = [read_request(body).header.rewards[0].options for body in service.asked("/enqueue")]
    assert sorted(options, key=len) == [{}, {"x": 1}]


def test_the_row_and_the_texts_are_sent():
    with Honest() as service:
        scored([("glow", 1.0, remote(service, "glow"))], group(1, row={"caption": "x", "fps": 8}, text="hi"))
        scored([("glow", 1.0, remote(service, "glow", columns=["caption"]))], group(1, row={"caption": "x", "fps": 8}))
    first, second = (read_request(body).header.groups[0] for body in service.asked("/enqueue"))
    assert (first.row, first.texts) == ({"caption": "x", "fps": 8}, ["hi"])
    assert (second.row, second.texts) == ({"caption": "x"}, [])


def refusal(function, scoring):
    with pytest.raises(SampleError) as caught:
        scored([("glow", 1.0, function)], scoring)
    return caught.value


@pytest.mark.parametrize(
    ("keys", "scoring", "said"),
    [
        ({"media": "latent"}, group(1), "rollouts of 3 have no media 'latent': video"),
        ({"columns": ["fps"]}, group(1), "the row has no column fps; it has caption"),
        ({}, group(1, row={"caption": object()}), "the prompt's row cannot be sent as JSON"),
        ({"reward": "parts.c"}, group(1), "returned no scores for parts.c, but for parts.a, parts.b"),
    ],
)
def test_what_cannot_be_asked_is_an_error_of_the_sample(keys, scoring, said):
    with Honest() as service:
        error = refusal(remote(service, **{"reward": "glow", **keys}), scoring)
    assert said in error.reason and error.final


def test_a_dead_service_is_worth_another_attempt_and_a_lie_is_not():
    with Service() as dead:
        pass
    error = refusal(remote(dead, "glow", deadline_s=0.3), group(1))
    assert not error.final and "raised ConnectionError: no scores within deadline_s = 0.3" in error.reason
    with Service(enqueues=[(422, "no")]) as service:
        assert refusal(remote(service, "glow"), group(1)).final


def test_a_missing_package_is_told_with_the_line_that_installs_it(monkeypatch):
    monkeypatch.delitem(sys.modules, "cosmos_rl_core.reward.client")
    monkeypatch.setitem(sys.modules, "httpx", None)
    reason = refusal(RemoteReward(reward="glow", url="http://127.0.0.1:1", token="x"), group(1)).reason
    assert f"a remote reward needs httpx: {pip_install('cosmos-rl-core[reward]')}" in reason


def test_every_component_hears_of_a_failure():
    async def run(rewards, scoring):
        return await asyncio.gather(*(reward(scoring) for reward in rewards), return_exceptions=True)

    with Service(enqueues=[(422, "no")]) as service:
        rewards = [remote(service, "glow"), remote(service, "parts.a")]
        found = asyncio.run(run(rewards, group(1)))
    assert [type(error) for error in found] == [RewardServiceError] * 2
    assert len(service.seen) == 1


def test_a_component_that_stops_waiting_does_not_stop_the_others():
    async def run(service):
        scoring = group(5)
        first = asyncio.create_task(remote(service, "glow")(scoring))
        second = asyncio.create_task(remote(service, "parts.a")(scoring))
        await asyncio.sleep(0)
        first.cancel()
        return await second

    with Honest() as service:
        assert asyncio.run(run(service)) == [5.0]


def test_a_recipe_names_it_and_its_mistakes_are_told():
    name = "cosmos_rl_core.reward.remote:RemoteReward"
    reward = build_reward(name, TINY, options={"reward": "glow", "url": "http://127.0.0.1:1", "token": "x"})
    assert reward.address().fetch_url == "http://127.0.0.1:1/api/reward/fetch"
    with pytest.raises(UserError, match='did you mean "deadline_s"'):
        build_reward(name, TINY, options={"reward": "glow", "deadline": 3})
    with pytest.raises(UserError, match="reward is empty"):
        build_reward(name, TINY, options={"reward": {}})


@pytest.mark.parametrize("prefix", ["WFM_REWARD", "REMOTE_REWARD"])
def test_the_environment_says_where_the_service_is(monkeypatch, prefix):
    for name in ("TOKEN", "ENQUEUE_URL", "FETCH_URL"):
        monkeypatch.delenv(f"WFM_REWARD_{name}", raising=False)
        monkeypatch.setenv(f"{prefix}_{name}", f"http://host/{name}")
    found = RemoteReward(reward="glow").address()
    assert (found.enqueue_url, found.fetch_url, found.token) == tuple(
        f"http://host/{name}" for name in ("ENQUEUE_URL", "FETCH_URL", "TOKEN")
    )


def test_an_address_that_nobody_gave_is_asked_for(monkeypatch):
    for prefix in ("WFM_REWARD", "REMOTE_REWARD"):
        for name in ("TOKEN", "ENQUEUE_URL", "FETCH_URL"):
            monkeypatch.delenv(f"{prefix}_{name}", raising=False)
    with pytest.raises(UserError, match=r"give the option url.* or set WFM_REWARD_ENQUEUE_URL"):
        RemoteReward(reward="glow").address()
    with pytest.raises(UserError, match="needs a token: set WFM_REWARD_TOKEN"):
        RemoteReward(reward="glow", url="http://127.0.0.1:1").address()

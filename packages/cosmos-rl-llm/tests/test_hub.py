"""Lines of `cosmos-rl doctor` about the hub and its cache."""

import threading
import time
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from huggingface_hub import constants

from cosmos_rl_core.storage.hub import seconds_ahead, silence
from cosmos_rl_llm import hub


def test_a_hub_that_does_not_answer_is_a_note(monkeypatch, tmp_path):
    (tmp_path / "models--a--b").mkdir()
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(hub, "silence", lambda: "the hub does not answer (timed out)")
    monkeypatch.setattr(hub, "seconds_ahead", lambda: None)
    asked, cache = hub.checks()
    assert (asked.level, asked.text) == ("note", "the hub does not answer (timed out)")
    assert "HF_ENDPOINT" in asked.fix
    assert (cache.level, "1 models" in cache.text) == ("ok", True)


def test_a_hub_that_answers_is_ok(monkeypatch, tmp_path):
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "none"))
    monkeypatch.setattr(hub, "silence", lambda: "")
    monkeypatch.setattr(hub, "seconds_ahead", lambda: -4.0)
    asked, cache = hub.checks()
    assert (asked.level, asked.text) == ("ok", f"{constants.ENDPOINT} answers")
    assert "does not exist yet" in cache.text


@pytest.mark.parametrize(
    ("seconds", "shown"), [(40.0, "40 s ahead of the hub's"), (-3600.0, "3600 s behind the hub's")]
)
def test_a_clock_that_is_not_the_hubs_is_a_note(monkeypatch, seconds, shown):
    monkeypatch.setattr(hub, "silence", lambda: "")
    monkeypatch.setattr(hub, "seconds_ahead", lambda: seconds)
    _, clock, _ = hub.checks()
    assert (clock.level, clock.name, clock.text) == ("note", "clock", shown)


class Dated(BaseHTTPRequestHandler):
    """A hub whose clock is `ahead_s` seconds from this machine's."""

    ahead_s = 0.0
    status = 200

    def do_GET(self):
        self.send_response_only(self.status)
        self.send_header("Date", formatdate(time.time() + self.ahead_s, usegmt=True))
        self.end_headers()

    def log_message(self, *_):
        pass


@pytest.mark.parametrize("status", [200, 403])
@pytest.mark.parametrize("seconds", [0.0, 90.0, -7200.0])
def test_the_clock_is_compared_with_the_date_of_the_hubs_answer(monkeypatch, seconds, status):
    hub_of = type("Hub", (Dated,), {"ahead_s": seconds, "status": status})
    with HTTPServer(("127.0.0.1", 0), hub_of) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        silence.cache_clear()
        try:
            found = seconds_ahead()
        finally:
            silence.cache_clear()
            server.shutdown()
    if seconds == 0:
        assert found == 0  # up to a second, and the time that the answer took
    else:
        assert found == pytest.approx(-seconds, abs=4)
        assert abs(found) < abs(seconds)  # at the least


def test_without_an_answer_nothing_is_known_of_the_clock(monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    silence.cache_clear()
    assert seconds_ahead() is None
    silence.cache_clear()

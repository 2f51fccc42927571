"""Pictures from URLs: a server on this machine that answers well, late, partly, elsewhere or not at all."""

import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote

import pytest

from cosmos_rl_core.errors import MediaError
from cosmos_rl_llm.config import MediaSection
from cosmos_rl_llm.media import fetch as module
from cosmos_rl_llm.media.fetch import fetch
from cosmos_rl_llm.media.source import read_bytes

CONTENT = b"picture" * 100
REDIRECTS = {"/moved": "/a.png", "/ftp": "ftp://127.0.0.1/a.png", "/file": "file:///a.png", "/loop": "/loop"}


class Answers(BaseHTTPRequestHandler):
    def do_GET(self):
        self.server.seen.append((unquote(self.path), self.headers["User-Agent"]))
        path = self.path.partition("?")[0]
        if path in REDIRECTS or path == "/secure":
            self.send_response(302)
            self.send_header("Location", REDIRECTS.get(path, "https://127.0.0.1/a.png"))
            return self.end_headers()
        if path == "/gone" or (path == "/busy" and len(self.server.seen) < 3) or path == "/down":
            return self.send_error(404 if path == "/gone" else 503)
        self.send_response(200)
        self.send_header("Content-Length", str(len(CONTENT)))
        self.end_headers()
        if path == "/silent":
            self.server.ended.wait(10)
        elif path == "/drip":
            for place in range(len(CONTENT)):
                self.wfile.write(CONTENT[place : place + 1])
                if self.server.ended.wait(0.05):
                    break
        else:
            self.wfile.write(CONTENT[:50] if path == "/short" else CONTENT)
        return None

    def log_message(self, *_):
        pass


@pytest.fixture
def server():
    with ThreadingHTTPServer(("127.0.0.1", 0), Answers) as found:
        found.seen, found.ended = [], threading.Event()
        thread = threading.Thread(target=found.serve_forever, args=(0.01,))
        thread.start()
        yield found
        found.ended.set()
        found.shutdown()
        thread.join()


def get(server, path, *, scheme="http", **keys):
    url = f"{scheme}://127.0.0.1:{server.server_port}{path}"
    return fetch(url, **{"max_bytes": 10_000, "schemes": ("http",), "pause_s": 0.01, **keys})


def test_content_is_read_with_a_name_of_the_reader(server):
    assert get(server, "/a.png") == CONTENT
    assert server.seen == [("/a.png", "cosmos-rl")]


def test_a_url_is_quoted(server):
    assert get(server, "/größe 1.png?n=ü&m=%20#part", scheme="HTTP") == CONTENT
    assert server.seen[0][0] == "/größe 1.png?n=ü&m= "


def test_no_more_is_read_than_the_limit(server):
    assert len(get(server, "/a.png", max_bytes=100)) == 101
    limits = MediaSection(schemes=("http",), max_bytes=100)
    with pytest.raises(MediaError, match=r"101 bytes, more than the 100 allowed"):
        read_bytes(f"http://127.0.0.1:{server.server_port}/a.png", limits)


def test_a_redirect_is_followed_within_the_schemes_of_the_recipe(server):
    assert get(server, "/moved") == CONTENT
    for path in ("/ftp", "/file", "/secure"):
        with pytest.raises(MediaError, match=r"not allowed") as caught:
            get(server, path, schemes=("file", "http"))
        assert caught.value.final
    with pytest.raises(MediaError, match="redirect"):
        get(server, "/loop")


def test_a_busy_server_is_asked_again(server):
    assert get(server, "/busy") == CONTENT
    assert len(server.seen) == 3


@pytest.mark.parametrize(
    ("path", "reason", "tries", "final"),
    [
        ("/down", "503 Service Unavailable", 3, False),
        ("/gone", "404 Not Found", 1, True),
        ("/short", "50 of 700", 3, False),
    ],
)
def test_an_error_is_final_unless_a_later_try_may_mend_it(server, path, reason, tries, final):
    with pytest.raises(MediaError, match=reason) as caught:
        get(server, path)
    assert len(server.seen) == tries
    assert caught.value.final is final


def test_a_server_that_drips_has_a_deadline(server):
    begin = time.monotonic()
    with pytest.raises(MediaError, match="not complete in time") as caught:
        get(server, "/drip", within_s=0.3)
    assert time.monotonic() - begin < 5
    assert not caught.value.final


def test_a_silent_server_has_a_deadline(server, monkeypatch):
    monkeypatch.setattr(module, "ANSWER_S", 0.1)
    with pytest.raises(MediaError, match="timed out"):
        get(server, "/silent", within_s=1.0)


def test_a_server_that_does_not_answer_is_not_final(server):
    server.server_close()
    with pytest.raises(MediaError, match="refused") as caught:
        get(server, "/a.png")
    assert not caught.value.final


def test_schemes_have_any_case_and_files_may_have_colons(server, tmp_path):
    port = server.server_port
    limits = MediaSection(root=str(tmp_path), schemes=("http", "data"))
    assert read_bytes(f"HTTP://127.0.0.1:{port}/a.png", limits) == CONTENT
    assert read_bytes("DATA:image/png;BASE64,aaaa", limits) == b"i\xa6\x9a"
    for name in ("10:30.jpg", "cam:1.png"):
        (tmp_path / name).write_bytes(b"abc")
        assert read_bytes(name, limits) == b"abc"
    with pytest.raises(MediaError, match=r"URLs with s3: are not allowed"):
        read_bytes("s3://bucket/a.png", limits)

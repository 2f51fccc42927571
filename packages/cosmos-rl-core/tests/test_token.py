"""The run's token file."""

import stat

import pytest

from cosmos_rl_core.errors import UserError
from cosmos_rl_core.wire.handshake import keep_secret, make_token, read_token


def test_a_made_token_is_read_back_and_private(tmp_path):
    path = tmp_path / "token"
    token = make_token(path)
    assert len(token) == 32
    assert read_token(path) == token
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_two_tokens_differ(tmp_path):
    assert make_token(tmp_path / "a") != make_token(tmp_path / "b")


def test_an_existing_token_is_never_overwritten(tmp_path):
    token = make_token(tmp_path / "token")
    with pytest.raises(UserError, match="exists"):
        make_token(tmp_path / "token")
    assert read_token(tmp_path / "token") == token


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620])
def test_a_token_others_may_read_or_write_is_refused_with_the_command_that_mends_it(tmp_path, mode):
    path = tmp_path / "token"
    make_token(path)
    path.chmod(mode)
    with pytest.raises(UserError, match=r"run chmod 600"):
        read_token(path)


@pytest.mark.parametrize("content", ["", "zz" * 32, "ab" * 31, "ab" * 40, "\udcff"])
def test_a_file_that_holds_no_token_is_refused(tmp_path, content):
    path = tmp_path / "token"
    path.write_bytes(content.encode("utf-8", "surrogateescape"))
    path.chmod(0o600)
    with pytest.raises(UserError, match="64 hex digits"):
        read_token(path)


def test_a_missing_token_file_is_named(tmp_path):
    with pytest.raises(UserError, match="cannot read the token file"):
        read_token(tmp_path / "token")


@pytest.mark.parametrize("damage", ["removed", "cut", "open to others", "another"])
def test_a_token_that_was_lost_is_written_again(tmp_path, damage):
    path = tmp_path / "token"
    token = make_token(path)
    match damage:
        case "removed":
            path.unlink()
        case "cut":
            path.write_text("00")
        case "open to others":
            path.chmod(0o644)
        case "another":
            path.write_text("00" * 32)
    keep_secret(path, token.hex())
    assert read_token(path) == token
    assert path.stat().st_mode & 0o777 == 0o600
    assert [file.name for file in tmp_path.iterdir()] == ["token"]


def test_a_token_that_is_there_is_left_alone(tmp_path):
    token = make_token(tmp_path / "token")
    before = (tmp_path / "token").stat().st_ino
    keep_secret(tmp_path / "token", token.hex())
    assert (tmp_path / "token").stat().st_ino == before

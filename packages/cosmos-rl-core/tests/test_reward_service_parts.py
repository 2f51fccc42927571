"""The reward service's parts by themselves: bodies, jobs, settings, tokens."""

from __future__ import annotations

import json
import struct
from io import BytesIO

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cosmos_rl_core.errors import UserError
from cosmos_rl_core.ops.reward_service.jobs import Jobs, QueueFull, RequestConflict
from cosmos_rl_core.ops.reward_service.settings import load_settings
from cosmos_rl_core.reward.pool.body import BodySpool
from cosmos_rl_core.reward.remote import client_token, server_token
from cosmos_rl_core.reward.request import GroupSpec, Header, RewardSpec, encode_body, read_request
from cosmos_rl_core.reward.wire_format import MalformedBody, find_arrays, safetensors_parts
from cosmos_rl_core.settings.base import ConfigError

DTYPES = ["?", "u1", "i1", "<i2", "<i4", "<i8", "<f2", "<f4", "<f8", ">f4"]


def header(*, size=2, media="none", rewards=("a",), **keys):
    specs = [RewardSpec(name) for name in rewards]
    return Header(groups=[GroupSpec(size=size)], rewards=specs, media=media, **keys)


def encoded(head, arrays):
    return b"".join(encode_body(head, arrays).pieces())


def safetensors(index, data=b""):
    text = index if isinstance(index, bytes) else json.dumps(index).encode()
    return struct.pack("<Q", len(text)) + text + data


@given(
    st.dictionaries(
        st.text(max_size=5),
        st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 3), max_size=4), st.integers(1, 3)),
        max_size=4,
    )
)
def test_arrays_come_out_as_they_went_in(specs):
    rng = np.random.default_rng(0)
    arrays = {
        name: [(rng.random(shape) * 100).astype(dtype) for _ in range(count)]
        for name, (dtype, shape, count) in specs.items()
        if name != "__metadata__"
    }
    body = b"\n" + b"".join(safetensors_parts(arrays))  # nothing lies aligned
    found = find_arrays(body, 1)
    assert set(found) == set(arrays)
    for name, parts in arrays.items():
        np.testing.assert_array_equal(found[name].read(body), np.stack(parts))


def test_other_readers_of_safetensors_read_ours():
    from safetensors.numpy import load

    arrays = {"video": [np.full((2, 3), i, np.uint8) for i in range(2)], "latent": [np.ones(3, np.float16)] * 2}
    loaded = load(b"".join(safetensors_parts(arrays)))
    assert {name: (array.shape, str(array.dtype)) for name, array in loaded.items()} == {
        "video": ((2, 2, 3), "uint8"),
        "latent": ((2, 3), "float16"),
    }


def test_arrays_in_a_body_lie_aligned():
    body = encoded(header(), {"b": [np.ones(3, np.uint8)] * 2, "x": [np.ones(3, np.float64)] * 2})
    places = read_request(body).places
    assert places["x"].start % 8 == 0


def entry(*, dtype="U8", shape=(4,), offsets=(0, 4)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"abc", "safetensors are 8 or more"),
        (struct.pack("<Q", 2**60) + b"{}", "its index would have"),
        (safetensors(b"[1]"), "index is malformed"),
        (safetensors(b"\xff"), "index is malformed"),
        (safetensors({"a": 1}), "index is malformed"),
        (safetensors({"a": entry(dtype="BF16", shape=(2,))}, b"abcd"), "'a' has dtype BF16"),
        (safetensors({"a": entry(shape=(5,))}, b"abcd"), "its offsets "),
        (safetensors({"a": entry(shape=(-4,))}, b"abcd"), "index is malformed"),
        (safetensors({"a": entry(shape=(2**62, 4), offsets=(0, 4))}, b"abcd"), "its offsets "),
        (safetensors({"a": entry()}, b"abc"), "the arrays take 4 bytes of data; received 3"),
        (safetensors({"a": entry()}, b"abcde"), "the arrays take 4 bytes of data; received 5"),
        (safetensors({"a": entry(), "b": entry()}, b"abcd"), "'b' starts at byte 0 of the data, not 4"),
        (safetensors({"a": entry(offsets=(2, 6))}, b"abcdef"), "'a' starts at byte 2 of the data, not 0"),
        (b"\x93NUMPY\x01\x00\x02\x00{}", ".npy header is malformed"),
        (b"\x93NUMPY\x09\x00", ".npy header is malformed"),
    ],
)
def test_what_is_no_array_is_refused_with_its_place(content, said):
    with pytest.raises(MalformedBody) as caught:
        find_arrays(b"line\n" + content, 5)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("header", "said"),
    [  # most made numpy's reader raise something else than ValueError
        (b"((((((", ".npy header is malformed"),
        (b"if 1:\n  2\n 3", ".npy header is malformed"),
        (b"-" * 9000 + b"1", ".npy header is malformed"),
        (b"{[]: 1}", ".npy header is malformed"),
        (b"{'descr': '<f4', 'fortran_order': False, 'shape': (1 2,), }", "shape (1 2,)"),
        (b"{'descr': '<f4', 'fortran_order': False, 'shape': (%s,), }" % (b"9" * 5000), "shape (999"),
        (b"{'descr': '<f3', 'fortran_order': False, 'shape': (1,), }", "has dtype <f3"),
        (b"{'descr': '<f4', 'fortran_order': False, 'shape': (1,), }", "does not end where the body does"),
    ],
    ids=["brackets", "indentation", "deep", "unhashable", "shape", "digits", "dtype", "short"],
)
def test_a_header_that_numpy_does_not_write_is_refused(header, said):
    with pytest.raises(MalformedBody) as caught:
        find_arrays(b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header, 0)
    assert said in str(caught.value)


NPY_ARRAYS = [np.arange(6.0).reshape(2, 3), np.asfortranarray(np.eye(3, dtype=">f2")), np.ones(())]


@pytest.mark.parametrize("version", [(1, 0), (2, 0), (3, 0)])
@pytest.mark.parametrize("array", NPY_ARRAYS, ids=["plain", "fortran", "scalar"])
def test_an_npy_file_is_read_as_numpy_wrote_it(version, array):
    file = BytesIO()
    np.lib.format.write_array(file, array, version=version)
    content = file.getvalue()
    read = find_arrays(content, 0)["array"].read(content)
    assert (read.dtype, read.shape) == (array.dtype, array.shape) and (read == array).all()


@given(st.binary(max_size=200))
def test_any_bytes_are_a_request_or_malformed(content):
    for body in (content, b'{"groups": [{"size": 1}], "rewards": [{"name": "a"}]}\n' + content):
        try:
            read_request(body)
        except MalformedBody:
            continue


@pytest.mark.parametrize(
    ("media", "array", "said"),
    [
        ("video", np.zeros((2, 2, 2, 1), np.uint8), "it must be [B, frames, height, width, 3]"),
        ("video", np.zeros((2, 2, 3), np.uint8), "it must be [B, frames, height, width, 3]"),
        ("video", np.zeros((0, 2, 2, 3), np.uint8), "it must be [B, frames, height, width, 3]"),
        ("video", np.zeros((1, 2, 2, 3), np.int32), "it must be uint8, or floats in [0, 1]"),
        ("latent", np.zeros((2, 1, 2, 2), np.uint8), "it must be float16 or float32"),
    ],
)
def test_media_of_a_wrong_shape_or_type_is_refused(media, array, said):
    with pytest.raises(MalformedBody) as caught:
        read_request(encoded(header(media=media), {media: [array, array]}))
    assert said in str(caught.value)


def test_arrays_must_have_as_many_samples_as_the_groups():
    with pytest.raises(MalformedBody, match=r"'latent' is .* the groups have 3 samples"):
        read_request(encoded(header(size=3), {"latent": [np.zeros((2, 1, 2, 2), np.float16)] * 2}))


def test_rewards_see_groups_with_rows_texts_and_media():
    groups = [GroupSpec(size=1, row={"caption": "x"}, texts=["a"]), GroupSpec(size=2, row={"fps": 5}, texts=["b", "c"])]
    frames = [np.full((2, 2, 3), i, np.float32) / 4 for i in range(3)]
    request = Header(groups=groups, rewards=[RewardSpec("a")], media="image", fps=16.0)
    body = encoded(request, {"image": frames})
    first, second = read_request(body).read_groups(body)
    assert [first.prompt.row, second.prompt.row] == [{"caption": "x", "fps": 16.0}, {"fps": 5}]
    assert [r.text for r in (*first.rollouts, *second.rollouts)] == ["a", "b", "c"]
    pixels = [r.media["image"] for r in (*first.rollouts, *second.rollouts)]
    assert [(p.dtype, int(p[0, 0, 0])) for p in pixels] == [(np.uint8, 0), (np.uint8, 64), (np.uint8, 128)]


def test_floats_that_are_no_pixels_are_refused():
    body = encoded(header(media="image"), {"image": [np.full((2, 2, 3), 200.0, np.float32)] * 2})
    with pytest.raises(ValueError, match=r"'image' holds floats from 200.0 to 200.0; they must be in \[0, 1\]"):
        read_request(body).read_groups(body)


def test_arrays_that_differ_in_shape_cannot_be_sent():
    arrays = {"video": [np.zeros((2, 2, 2, 3), np.uint8), np.zeros((3, 2, 2, 3), np.uint8)]}
    with pytest.raises(ValueError, match="'video' of sample 1 is uint8"):
        encode_body(header(media="video"), arrays)


def test_neighbours_with_equal_prompts_of_cosmos_rl_are_a_group():
    keys = {"prompts": ["a", "a", "b"], "reward_fn": {"x": 0.5, "y": -1.0}, "video_infos": [{"video_fps": 8.0}] * 3}
    np.save(buffer := BytesIO(), np.zeros((3, 16, 2, 4, 4), np.float16))
    request = read_request(
        json.dumps(keys | {"media_type": "video", "score": [1, 1, 2]}).encode() + b"\n" + buffer.getvalue()
    )
    assert [(g.size, g.row) for g in request.header.groups] == [
        (2, {"caption": "a", "score": 1}),
        (1, {"caption": "b", "score": 2}),
    ]
    assert [(r.name, r.weight) for r in request.header.rewards] == [("x", 0.5)]
    assert (request.header.media, request.header.fps) == ("latent", 8.0)


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


def jobs(clock=None, **keys):
    settings = {"queue_size": 2, "queue_bytes": 100, "ttl_s": 10.0, "fetched_ttl_s": 2.0, "rewards": [{"name": "a"}]}
    return Jobs(load_settings(settings | keys), clock=clock or Clock())


def spool(content=b"abc"):
    filled = BodySpool()
    filled.write(content)
    return filled


def test_results_are_kept_until_their_time_is_over():
    clock = Clock()
    held = jobs(clock)
    job, _ = held.add(header(id="mine"), spool())
    clock.now += 1000  # what is not done does not expire
    held.forget_expired()
    held.score(job, 0, {"a": [1.0, 2.0]})
    clock.now += 9.9
    assert held.find(job.uuid) is job
    held.fetched(job)
    clock.now += 1.9
    assert held.find(job.uuid) is job, "an answer that was lost on the way can be asked for again"
    clock.now += 0.2
    assert held.find(job.uuid) is None
    held.forget_expired()
    again, is_new = held.add(header(id="mine"), spool(b"other"))
    assert is_new and again is not job


def test_an_unfetched_result_expires():
    clock = Clock()
    held = jobs(clock)
    job, _ = held.add(header(), spool())
    held.fail(job, "broken")
    clock.now += 10.0
    assert held.find(job.uuid) is None


@pytest.mark.parametrize(
    "scores",
    [{}, {"a": [1.0]}, {"a": [1.0, float("nan")]}, {"a": [1.0, float("inf")]}, {"b": [1.0, 2.0]}, {"a.x": [1.0]}],
)
def test_scores_that_are_none_fail_the_job(scores):
    held = jobs()
    job, _ = held.add(header(), spool())
    held.score(job, 0, scores)
    assert job.done.is_set() and job.error and not job.scores


def test_a_job_is_done_after_its_last_reward_and_fails_with_its_first_failure():
    held = jobs()
    job, _ = held.add(header(rewards=("a", "b")), spool())
    held.score(job, 1, {"b": [1.0, 2.0]})
    assert not job.done.is_set()
    held.score(job, 0, {"a": [3.0, 4.0]})
    assert job.done.is_set() and not job.error
    other, _ = held.add(header(rewards=("a", "b")), spool())
    held.fail(other, "broken")
    held.score(other, 1, {"b": [1.0, 2.0]})
    assert (other.error, other.scores) == ("broken", {})


def test_the_queue_is_bounded_in_number_and_bytes():
    held = jobs()
    with held.reserve(60):
        with pytest.raises(QueueFull), held.reserve(41):
            pass
        with held.reserve(40), pytest.raises(QueueFull), held.reserve(0):
            pass
    assert (held.num_open, held.open_bytes) == (0, 0)
    with held.reserve(1000):  # alone, anything below max_body_bytes is taken
        job, _ = held.add(header(), spool())
    assert (held.num_open, held.open_bytes) == (1, 3)
    held.fail(job, "broken")
    assert (held.num_open, held.open_bytes) == (0, 0)


def test_a_request_id_belongs_to_one_body_of_one_client():
    held = jobs()
    first, _ = held.add(header(id="1", client="a"), spool())
    assert held.add(header(id="1", client="a"), spool()) == (first, False)
    assert held.add(header(id="1", client="b"), spool(b"other"))[1]
    with pytest.raises(RequestConflict):
        held.add(header(id="1", client="a"), spool(b"other"))


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        ({}, "rewards: is required"),
        ({"rewards": []}, "rewards"),
        ({"rewards": [{"name": "a:b"}, {"name": "c:b"}]}, "two rewards are named b; give one a label"),
        ({"rewards": [{"name": "a", "worker": 2}]}, 'unknown key; did you mean "workers"?'),
        ({"rewards": [{"name": "a", "batch_size": 65}]}, "rewards.0.batch_size"),
        ({"rewards": [{"name": "a", "label": "x.y"}]}, "rewards.0.label"),
        ({"rewards": [{"name": "a"}], "port": -1, "hots": ""}, "2 problems"),
    ],
)
def test_wrong_settings_are_told_all_at_once(raw, said):
    with pytest.raises(ConfigError) as caught:
        load_settings(raw, file="rewards.toml")
    assert said in str(caught.value) and str(caught.value).startswith("rewards.toml: ")


def test_a_token_file_is_made_once_and_read_by_both_sides(tmp_path):
    file = str(tmp_path / "token")
    token = server_token(file, environ={})
    assert len(token) == 64 and (tmp_path / "token").stat().st_mode & 0o777 == 0o600
    assert server_token(file, environ={}) == client_token(file, environ={}) == token


@pytest.mark.parametrize("name", ["WFM_REWARD_TOKEN", "REMOTE_REWARD_TOKEN"])
def test_the_environment_gives_the_token(name):
    assert server_token("", environ={name: "x"}) == client_token("", environ={name: "x"}) == "x"


def test_a_bad_token_is_refused_without_showing_it(tmp_path):
    for token in ("two words", "line\nbreak", "dürer"):
        with pytest.raises(UserError, match="one word of printable ASCII") as caught:
            client_token("", environ={"WFM_REWARD_TOKEN": token})
        assert token not in str(caught.value)
    with pytest.raises(UserError, match="set WFM_REWARD_TOKEN"):
        server_token("", environ={})
    (tmp_path / "open").write_text("secret")
    (tmp_path / "open").chmod(0o644)
    with pytest.raises(UserError, match="chmod 600"):
        client_token(str(tmp_path / "open"), environ={})

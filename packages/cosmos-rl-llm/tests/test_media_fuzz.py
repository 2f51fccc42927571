"""Damaged pictures and videos, and odd locations: each is an error of its row, whatever a library raises."""

import io
import random
from dataclasses import replace

import numpy as np
import pytest

from cosmos_rl_core.errors import MediaError
from cosmos_rl_core.reward.specimen import text_specimen
from cosmos_rl_llm.config import MediaSection
from cosmos_rl_llm.media.source import FORMATS, PromptMedia, PromptRecorder, decode_picture, decode_video, media_errors
from cosmos_rl_llm.media.vision import Vision

av = pytest.importorskip("av")
pytest.importorskip("PIL")

from PIL import features  # noqa: E402
from tiny_vision import family_of, make, picture  # noqa: E402  it needs both

ALL = MediaSection(schemes=("data", "file", "http", "https"))


def encoded(codec, pixels, container, *, sizes=((32, 24),), **options):
    """A video of 12 frames of each size."""
    parts = []
    for width, height in sizes:
        file = io.BytesIO()
        with av.open(file, "w", format=container, **options) as out:
            stream = out.add_stream(codec, rate=8)
            stream.width, stream.height, stream.pix_fmt = width, height, pixels
            for number in range(12):
                shade = np.full((height, width, 3), 20 * number, np.uint8)
                out.mux(stream.encode(av.VideoFrame.from_ndarray(shade, format="rgb24")))
            out.mux(stream.encode())
        parts.append(file.getvalue())
    return b"".join(parts)


def saved(kind):
    file = io.BytesIO()
    picture(32, 24, seed=0).save(file, format=kind)
    return file.getvalue()


PICTURES = [kind for kind in FORMATS if kind != "AVIF" or features.check("avif")]
VIDEOS = {
    "mp4": ("mpeg4", "yuv420p", "mp4"),
    "mkv": ("mpeg4", "yuv420p", "matroska"),
    "avi": ("mjpeg", "yuvj420p", "avi"),
    "gif": ("gif", "rgb8", "gif"),
    "ts": ("mpeg2video", "yuv420p", "mpegts"),
}


def mutated(rng, data):
    """Cut off, with other bytes, most of them at the beginning, or with bytes too many."""
    changed, way = bytearray(data), rng.random()
    if way < 0.15:
        return bytes(changed[: rng.randrange(len(changed))])
    for _ in range(rng.choice((1, 2, 4, 16))):
        place = rng.randrange(min(len(changed), rng.choice((32, 200, len(changed)))))
        changed[place] = rng.choice((0, 255, rng.randrange(256), changed[place] ^ 1 << rng.randrange(8)))
    if way < 0.3:
        place = rng.randrange(len(changed))
        changed[place:place] = changed[: rng.randrange(50)]
    return bytes(changed)


@pytest.fixture(scope="module")
def vision(tmp_path_factory):
    return Vision(family=family_of(make("qwen2_5_vl"), tmp_path_factory.mktemp("model")), limits=ALL)


def try_damaged(vision, kind, data, *, times, seed):
    """Return the number of damaged copies that are read all the same."""
    rng, read = random.Random(seed), 0
    for _ in range(times):
        try:
            item = vision.item({"type": kind, kind: mutated(rng, data)}, where="row 7")
        except MediaError as error:
            assert error.final
            assert error.reason.startswith(f"row 7: {kind}: blake2b:")
        else:
            assert np.isfinite(item.pixels).all()
            read += 1
    return read


TIMES = [pytest.param(30, id="quick"), pytest.param(3000, id="long", marks=pytest.mark.slow)]


@pytest.mark.filterwarnings("ignore::UserWarning")  # Pillow's about tags
@pytest.mark.parametrize("times", TIMES)
@pytest.mark.parametrize("kind", PICTURES)
def test_a_damaged_picture_is_read_or_an_error_of_its_row(vision, kind, times):
    assert try_damaged(vision, "image", saved(kind), times=times, seed=kind) < times


@pytest.mark.parametrize("times", TIMES)
@pytest.mark.parametrize("kind", VIDEOS)
def test_a_damaged_video_is_read_or_an_error_of_its_row(vision, kind, times):
    try_damaged(vision, "video", encoded(*VIDEOS[kind]), times=times, seed=kind)


ODD = {
    "base64 that is not ASCII": {"bytes": "ünö"},
    "data URL that is not ASCII": "data:image/png;base64,ünö",
    "NUL": "a\0b.png",
    "half a character": "\ud800.png",
    "URL with an open bracket": "http://[::1/a.png",
    "URL without a port": "http://127.0.0.1:port/a.png",
    "URL with a blank in the host": "http://a b/c.png",
    "URL without a host": "http:///c.png",
    "URL with an empty label": "http://ä..b/c.png",
    "content as a path": "iVBORw0KGgo" * 1000,
    "nothing": None,
}


@pytest.mark.parametrize("given", ODD.values(), ids=ODD)
def test_an_odd_location_is_an_error_of_its_row(vision, given):
    with pytest.raises(MediaError, match=r"rows\.jsonl:3: image: ") as caught:
        vision.item({"type": "image", "image": given}, where="rows.jsonl:3")
    assert len(caught.value.reason.encode()) < 300
    assert caught.value.final


def test_rewards_get_the_same_error():
    row = {"prompt": [{"role": "user", "content": [{"type": "image", "image": {"bytes": "ünö"}}]}]}
    with pytest.raises(MediaError, match=r"row 2: image: blake2b:.*not base64"):
        PromptMedia(row, ALL, where="row 2")["image"]


def test_an_error_of_a_processor_names_its_class():
    with (
        pytest.raises(MediaError, match=r"row 1: image: a\.png: NotImplementedError: pixel format"),
        media_errors({"type": "image", "image": "a.png"}, where="row 1"),
    ):
        raise NotImplementedError("pixel format")


@pytest.mark.skipif(not features.check("avif"), reason="Pillow without AVIF")
def test_a_damaged_avif_is_an_error_of_its_row():
    data = saved("AVIF")
    with pytest.raises(MediaError, match="a damaged picture: "):
        decode_picture(data[: len(data) - 30], ALL)


def test_formats_that_run_programs_are_not_read():
    file = io.BytesIO()
    picture(8, 8, seed=0).save(file, format="EPS")
    with pytest.raises(MediaError, match="not a picture that can be read: PNG, JPEG"):
        decode_picture(file.getvalue(), ALL)


def test_a_video_of_an_unknown_codec_is_an_error_of_its_row():
    data = encoded("mpeg4", "yuv420p", "matroska").replace(b"V_MPEG4/ISO/ASP", b"V_UNKNOWN/CODEC")
    with pytest.raises(MediaError, match="there is no decoder for the video in it"):
        decode_video(data, ALL)


def test_titles_of_a_video_need_not_be_text():
    file = io.BytesIO()
    with av.open(file, "w", format="matroska") as out:
        out.metadata["title"] = "TITLE"
        stream = out.add_stream("mpeg4", rate=8)
        stream.width, stream.height, stream.pix_fmt = 32, 24, "yuv420p"
        out.mux(stream.encode(av.VideoFrame.from_ndarray(np.zeros((24, 32, 3), np.uint8), format="rgb24")))
        out.mux(stream.encode())
    assert b"TITLE" in file.getvalue()
    assert decode_video(file.getvalue().replace(b"TITLE", b"T\xffTLE"), ALL).frames.shape == (1, 24, 32, 3)


def test_a_video_may_change_its_size():
    found = decode_video(encoded("mpeg2video", "yuv420p", "mpegts", sizes=((32, 24), (64, 48))), MediaSection(fps=8.0))
    assert found.frames.shape == (12, 24, 32, 3)


def test_a_prompt_without_a_message_of_the_user_is_in_the_gallery(tmp_path):
    file = tmp_path / "a.png"
    file.write_bytes(saved("PNG"))
    parts = [{"type": "image", "image": str(file)}, {"type": "text", "text": "red ?"}]
    row = {"prompt": [{"role": "system", "content": parts}]}
    recorder = PromptRecorder(tmp_path / "media", name="", groups=1, every=1)
    group = group_of(row)
    assert recorder.save(0, group) is not None


def group_of(row):
    media = PromptMedia(row, ALL)
    group = text_specimen(row, texts=["red", "blue"], origin="row 1", arrays={})
    rollouts = tuple(replace(rollout, media=media) for rollout in group.rollouts)
    return replace(group, media=media.locations, rollouts=rollouts)

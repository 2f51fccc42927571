"""Rewards over pixels and drawn text: hand-made clips with known values."""

import asyncio
import subprocess
import sys

import numpy as np
import pytest
from glyph_reader import GlyphReader, draw_text
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from wfm_fixtures import shown

from cosmos_rl_core.errors import UserError
from cosmos_rl_core.testing.conformance import check_reward
from cosmos_rl_wfm.rewards import REWARDS
from cosmos_rl_wfm.rewards.ocr import edit_distance, match, quoted
from cosmos_rl_wfm.rewards.pixels import direction
from cosmos_rl_wfm.rewards.video import luma, sample_frames

PIXELS = ["brightness", "contrast", "saturation", "sharpness", "motion", "flicker", "speed"]

GLYPHS = "glyph_reader:GlyphReader"


def score(name: str, video, caption: str = "a disc", **options) -> float:
    (value,) = REWARDS[name](**options)(shown(video, caption=caption))
    return value


def flat(value, *, frames: int = 4, size: int = 8) -> np.ndarray:
    return np.full((frames, size, size, 3), value, np.uint8)


def moving_square(step, *, start=(8, 8), frames=5, size=32, side=4, value=200) -> np.ndarray:
    video = np.zeros((frames, size, size, 3), np.uint8)
    for f in range(frames):
        row, column = start[0] + f * step[0], start[1] + f * step[1]
        video[f, row : row + side, column : column + side] = value
    return video


def alternating(frames: int = 4) -> np.ndarray:
    video = flat(0, frames=frames)
    video[1::2] = 255
    return video


def test_luma_of_white_is_one_and_green_weighs_most():
    assert luma(np.array([255, 255, 255], np.uint8)) == pytest.approx(1.0)
    assert luma(np.array([0, 255, 0], np.uint8)) == pytest.approx(0.7152)


@pytest.mark.parametrize(
    ("name", "video", "value"),
    [
        ("brightness", flat(255), 1.0),
        ("brightness", flat(51), 0.2),
        ("contrast", flat(130), 0.0),
        ("contrast", np.tile(np.array([0, 255], np.uint8)[:, None], (2, 4, 4, 3)), 0.5),
        ("saturation", flat(130), 0.0),
        ("saturation", flat(0), 0.0),
        ("saturation", np.tile(np.array([200, 100, 100], np.uint8), (2, 4, 4, 1)), 0.5),
        ("sharpness", flat(130), 0.0),
        ("motion", flat(130), 0.0),
        ("motion", alternating(), 1.0),
        ("flicker", flat(130), 0.0),
        ("flicker", alternating(), -1.0),
        ("flicker", np.stack([flat(v, frames=1)[0] for v in (0, 50, 100, 150)]), 0.0),
    ],
)
def test_statistic_has_the_value_worked_out_by_hand(name, video, value):
    assert score(name, video) == pytest.approx(value, abs=1e-6)


def test_sharpness_is_the_variance_of_the_laplacian():
    video = flat(0, frames=1, size=5)
    video[0, 2, 2] = 255
    laplacian = np.array([[0, 1, 0], [1, -4, 1], [0, 1, 0]])
    assert score("sharpness", video) == pytest.approx(laplacian.var(), rel=1e-6)


def test_sharpness_refuses_a_clip_without_an_inside():
    with pytest.raises(UserError, match="at least 3 x 3"):
        score("sharpness", flat(0, size=2))


def test_saturation_does_not_overflow_its_bytes():
    video = np.tile(np.array([255, 0, 10], np.uint8), (1, 2, 2, 1))
    assert score("saturation", video) == 1.0


@pytest.mark.parametrize(
    ("caption", "step", "value"),
    [
        ("a square moving right", (0, 2), 2.0),
        ("a square moving left", (0, 2), -2.0),
        ("a square moving up", (-1, 0), 1.0),
        ("a square Moving Down slowly", (3, 0), 3.0),
        ("a square moves to the right", (1, 2), 2.0),
        ("a square moving up", (0, 2), 0.0),
    ],
)
def test_speed_is_displacement_along_the_caption(caption, step, value):
    assert score("speed", moving_square(step), caption) == pytest.approx(value, abs=1e-6)


def test_speed_does_not_see_noise_below_the_floor():
    noise = np.random.default_rng(0).integers(0, 20, (5, 32, 32, 3), dtype=np.uint8)
    noisy = np.maximum(moving_square((0, 2)), noise)
    assert score("speed", noisy, "moving right") == pytest.approx(2.0, abs=1e-6)
    assert score("speed", noisy, "moving right", floor=0.0) < 1.9


def test_speed_skips_frames_without_anything_bright():
    video = moving_square((0, 2))
    video[2] = 0
    assert score("speed", video, "moving right") == pytest.approx(2.0, abs=1e-6)


def test_speed_of_nothing_is_zero():
    assert score("speed", flat(0), "moving right") == 0.0


@given(
    columns=st.lists(st.integers(0, 28), min_size=2, max_size=6),
    towards=st.sampled_from(["left", "right", "up", "down"]),
)
@settings(max_examples=50, deadline=None)
def test_speed_turns_its_sign_when_time_does(columns, towards):
    video = np.zeros((len(columns), 16, 32, 3), np.uint8)
    for f, column in enumerate(columns):
        video[f, f : f + 4, column : column + 4] = 255
    forwards, backwards = (score("speed", clip, f"moving {towards}") for clip in (video, video[::-1]))
    assert forwards == pytest.approx(-backwards, abs=1e-6)


@pytest.mark.parametrize("caption", ["a disc", "moving left then moving right", "removing right"])
def test_a_caption_must_name_one_direction(caption):
    with pytest.raises(UserError, match="must name one of moving"):
        direction(caption)


@pytest.mark.parametrize(
    ("num_frames", "wanted"), [(1, [5]), (2, [2, 7]), (5, [1, 3, 5, 7, 9]), (10, range(10)), (99, range(10))]
)
def test_frames_are_taken_from_the_middle_of_equal_parts(num_frames, wanted):
    video = np.arange(10)[:, None, None, None]
    assert sample_frames(video, num_frames).ravel().tolist() == list(wanted)


@pytest.mark.parametrize("name", PIXELS)
@pytest.mark.parametrize(
    ("video", "message"),
    [
        (None, "has no video"),
        (np.zeros((4, 8, 8, 3), np.float32), "float32 .4, 8, 8, 3.; it must be uint8"),
        (np.zeros((4, 3, 8, 8), np.uint8), "must be uint8 .F, H, W, 3."),
        (np.zeros((0, 8, 8, 3), np.uint8), "must be uint8 .F, H, W, 3."),
    ],
)
def test_a_bad_clip_is_an_error_and_never_a_number(name, video, message):
    with pytest.raises(UserError, match=message):
        REWARDS[name]()(shown(flat(0), video, caption="moving left"))


@pytest.mark.parametrize(("name", "frames"), [("motion", 1), ("flicker", 2), ("speed", 1)])
def test_too_few_frames_are_an_error(name, frames):
    with pytest.raises(UserError, match=f"has {frames} frames"):
        score(name, flat(9, frames=frames), "moving left")


@pytest.mark.parametrize("name", ["speed", "ocr"])
def test_a_missing_column_is_named_with_those_there_are(name):
    with pytest.raises(UserError, match="no text in column 'title'; its columns: caption"):
        REWARDS[name](column="title")(shown(flat(0), caption="moving left"))


def test_an_unknown_option_is_refused():
    with pytest.raises(ValidationError, match="Extra inputs"):
        REWARDS["speed"](flor=0.1)


@pytest.mark.parametrize("name", PIXELS)
def test_reward_passes_the_conformance_suite(name):
    group = shown(moving_square((0, 1)), flat(7, size=32), caption="moving right")
    asyncio.run(check_reward(REWARDS[name](), group))


def test_naming_the_rewards_loads_no_torch():
    code = "import sys, cosmos_rl_wfm.rewards; assert not {'torch', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


# Drawn text.


@pytest.mark.parametrize("text", ["HELLO", "Il1 illi11", "WMwm 0123", "The quick\nbrown fox"])
@pytest.mark.parametrize("inverted", [False, True])
def test_glyphs_reads_what_was_drawn(text, inverted):
    frame = draw_text(text, height=32, width=64, row=3, column=2)
    read = GlyphReader().read((255 - frame if inverted else frame)[None])
    assert read == [text.replace("\n", " ")]


def test_glyphs_reads_through_noise_and_at_a_larger_scale():
    frame = draw_text("Go 42", height=66, width=96, scale=2, row=4, column=4, ink=200, paper=60)
    noise = np.random.default_rng(0).normal(0, 30, frame.shape)
    read = GlyphReader(scale=2).read(np.clip(frame + noise, 0, 255).astype(np.uint8)[None])
    assert read == ["Go 42"]


def test_glyphs_reads_nothing_where_nothing_is_written():
    blank = flat(90, frames=1, size=32)
    shape = moving_square((0, 0), frames=1, side=10)
    small = flat(0, frames=1, size=4)
    assert [GlyphReader().read(frame) for frame in (blank, shape, small)] == [[""], [""], [""]]


@pytest.mark.parametrize(
    ("a", "b", "distance"),
    [("", "", 0), ("abc", "", 3), ("", "abc", 3), ("kitten", "sitting", 3), ("flaw", "lawn", 2), ("abc", "abc", 0)],
)
def test_edit_distance(a, b, distance):
    assert edit_distance(a, b) == distance


@given(st.text("abc", max_size=6), st.text("abc", max_size=6), st.text("abc", max_size=6))
def test_edit_distance_is_a_metric(a, b, c):
    assert edit_distance(a, b) == edit_distance(b, a)
    assert (edit_distance(a, b) == 0) == (a == b)
    assert edit_distance(a, c) <= edit_distance(a, b) + edit_distance(b, c)


@pytest.mark.parametrize(
    ("text", "value"),
    [("STOP", 1.0), ("s t o p", 1.0), ("the STOP sign", 1.0), ("STEP", 0.75), ("", 0.0), ("something else", 0.0)],
)
def test_match_is_one_minus_distance_over_length(text, value):
    assert match(text, "Stop") == pytest.approx(value)


@pytest.mark.parametrize(
    ("caption", "text"),
    [('a sign "STOP" there', "STOP"), ("a sign “Go home”", "Go home"), ('"A" above "B"', "A B")],
)
def test_the_quoted_text_is_wanted(caption, text):
    assert quoted(caption) == text


@pytest.mark.parametrize("caption", ["a sign", 'an empty "" one', 'blank " " too', "it's 'single'"])
def test_a_caption_without_quoted_text_is_an_error(caption):
    with pytest.raises(UserError, match="quotes no text"):
        quoted(caption)


def test_ocr_is_the_mean_over_frames():
    right, wrong = (draw_text(text, height=16, width=40, row=2, column=2) for text in ("STOP", "STEP"))
    video = np.stack([right, right, wrong, wrong])
    assert score("ocr", video, 'a sign "stop"', reader=GLYPHS) == pytest.approx((1 + 1 + 0.75 + 0.75) / 4)


def test_a_reader_that_nobody_has_is_refused_with_the_known_ones():
    with pytest.raises(ValidationError, match="no reader is called 'glyphs'; known: easyocr, paddleocr, pytesseract"):
        REWARDS["ocr"](reader="glyphs")


def test_an_absent_reader_says_what_to_install():
    with pytest.raises(UserError, match="pip install pytesseract"):
        score("ocr", flat(0), 'a sign "stop"', reader="pytesseract")


def test_options_a_reader_does_not_take_are_found_before_anything_runs():
    with pytest.raises(ValidationError, match="reader_options do not fit the reader 'glyph_reader:GlyphReader'"):
        REWARDS["ocr"](reader=GLYPHS, reader_options={"size": 2})

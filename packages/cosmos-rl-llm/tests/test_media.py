"""Pictures and videos of rows: where they may be read from, their limits, and their places in a chat."""

import base64
import io
import json
import struct

import numpy as np
import pytest
from pydantic import ValidationError

from cosmos_rl_core.errors import MediaError, UserError
from cosmos_rl_llm.config import LLMDataConfig, MediaSection
from cosmos_rl_llm.data.rows import normalise
from cosmos_rl_llm.media.item import expand_spans, view_of
from cosmos_rl_llm.media.source import Video, decode_picture, decode_video, read_bytes
from cosmos_rl_llm.media.vision import Vision, find_family

pytest.importorskip("av")
Image = pytest.importorskip("PIL.Image")

from tiny_vision import family_of, make, mp4, picture, turned, video  # noqa: E402  it needs both


def png(image=None):
    file = io.BytesIO()
    (image or picture(12, 9, seed=0)).save(file, format="png")
    return file.getvalue()


@pytest.fixture
def limits(tmp_path):
    (tmp_path / "a.png").write_bytes(png())
    return MediaSection(root=str(tmp_path))


def test_a_picture_comes_from_a_file_a_url_or_bytes(limits, tmp_path):
    text = base64.b64encode(png()).decode()
    given = ["a.png", f"file://{tmp_path}/a.png", f"data:image/png;base64,{text}", {"bytes": text}, {"path": "a.png"}]
    assert {read_bytes(one, limits) for one in given} == {png()}


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ("../a.png", "outside of data.media.root"),
        ("/etc/hostname", "outside of data.media.root"),
        ("b.png", "No such file"),
        ("https://example.org/a.png", "https: are not allowed .*data, file"),
        ("data:image/png;base64,$", "not base64"),
        ("data:image/png,abc", "must be data:TYPE;base64"),
        (7, "a path, a URL or bytes, not int"),
    ],
)
def test_a_picture_that_cannot_be_read_says_why(limits, given, reason):
    with pytest.raises(MediaError, match=reason):
        read_bytes(given, limits)


def test_limits_are_checked_before_pixels_are_decoded(tmp_path):
    with pytest.raises(MediaError, match=r"10000 x 10000 pixels, more than data\.media\.max_decoded_pixels = 67,1"):
        decode_picture(png(Image.new("1", (10_000, 10_000))), MediaSection())
    with pytest.raises(MediaError, match=r"too large a picture: .*decompression bomb"):
        decode_picture(png(Image.new("1", (20_000, 20_000))), MediaSection())
    with pytest.raises(MediaError, match="bytes, more than the 10 allowed"):
        read_bytes(png(), MediaSection(max_bytes=10))


@pytest.mark.parametrize("data", [b"", b"no picture", png()[:40]])
def test_a_damaged_picture_is_an_error_of_its_row(data):
    with pytest.raises(MediaError, match="picture"):
        decode_picture(data, MediaSection())


def test_frames_of_a_video_are_taken_at_the_rate_of_the_recipe():
    found = decode_video(mp4(), MediaSection(fps=2.0))
    assert found.frames.shape == (6, 24, 32, 3)
    np.testing.assert_allclose(found.times, np.arange(6) / 2)
    assert (found.fps, found.duration) == pytest.approx((2.0, 3.0))
    assert decode_video(mp4(), MediaSection(fps=8.0, max_frames=5)).frames.shape[0] == 5
    assert decode_video(mp4(), MediaSection(fps=0.1)).frames.shape[0] == 1
    few = decode_video(mp4(), MediaSection(fps=0.1, min_frames=4))
    np.testing.assert_allclose(few.times, [0, 1, 2, 2.875], atol=0.13)
    assert decode_video(mp4(frames=2), MediaSection(min_frames=4)).frames.shape[0] == 2
    assert decode_video(mp4(frames=1), MediaSection(min_frames=4)).frames.shape[0] == 1


@pytest.mark.parametrize("turns", range(4))
@pytest.mark.parametrize("mirrored", [False, True])
def test_a_video_of_a_phone_held_sideways_is_turned_upright(turns, mirrored):
    """Clockwise, as players do; that of a selfie is mirrored before."""
    stored = np.kron(np.array([[20, 90], [160, 230]], np.uint8), np.ones((12, 16), np.uint8))[..., None].repeat(3, -1)
    given = turned(mp4(frames=2, shown=stored), turns, mirrored=mirrored)
    seen = []
    found = decode_video(given, MediaSection(), lambda *size: seen.append(size) or (lambda frame: frame))
    assert found.frames.shape[1:] == ((24, 32, 3) if turns % 2 == 0 else (32, 24, 3))
    assert found.stored == seen[0][1:] == found.frames.shape[1:3]
    expected = np.rot90(stored[:, ::-1] if mirrored else stored, -turns)
    assert np.abs(found.frames[0].astype(int) - expected).mean() < 8


@pytest.mark.parametrize("tag", range(1, 9))
def test_a_picture_is_turned_as_its_exif_data_says(tag):
    """Equal to the upright one, stored in each of the eight ways of EXIF 2.32, 4.6.4 A."""
    upright = np.arange(12 * 9 * 3, dtype=np.uint8).reshape(12, 9, 3)
    ways = {  # by where the first row and the first column are seen
        1: upright,
        2: upright[:, ::-1],
        3: upright[::-1, ::-1],
        4: upright[::-1],
        5: upright.transpose(1, 0, 2),
        6: upright[:, ::-1].transpose(1, 0, 2),
        7: upright[::-1, ::-1].transpose(1, 0, 2),
        8: upright[::-1].transpose(1, 0, 2),
    }
    stored, exif, file = Image.fromarray(np.ascontiguousarray(ways[tag])), Image.Exif(), io.BytesIO()
    exif[0x0112] = tag
    stored.save(file, format="png", exif=exif)
    np.testing.assert_array_equal(np.asarray(decode_picture(file.getvalue(), MediaSection())), upright)


def saved(image, format, **options):
    file = io.BytesIO()
    image.save(file, format=format, **options)
    return file.getvalue()


def grey(data):
    """The values of one row of a decoded picture that is grey."""
    pixels = np.asarray(decode_picture(data, MediaSection()))
    assert (pixels == pixels[..., :1]).all()
    return pixels[0, :, 0].tolist()


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P", "RGB", "L"])
def test_what_is_transparent_is_white(mode):
    """As browsers show it: black there, and unseen by most programs, is what many files have."""
    image, options = Image.new(mode, (3, 1)), {}
    if mode in ("RGBA", "LA"):
        image.putpixel((0, 0), (*[0] * (len(mode) - 1), 255))
        image.putpixel((1, 0), (*[0] * (len(mode) - 1), 127))
        expected = [0, 128, 255]
    else:  # one colour is transparent
        if mode == "P":
            image.putpalette([0, 0, 0, 0, 0, 0, 8, 8, 8])
        image.putpixel((0, 0), 2 if mode == "P" else (8, 8, 8) if mode == "RGB" else 8)
        options, expected = {"transparency": (0, 0, 0) if mode == "RGB" else 0}, [8, 255, 255]
    assert grey(saved(image, "PNG", **options)) == expected


@pytest.mark.parametrize("format", ["PNG", "TIFF", "JPEG2000", "PPM"])
def test_grey_of_sixteen_bits_keeps_its_shades(format):
    shades = np.array([[0, 257, 32896, 65535]], np.uint16)
    assert grey(saved(Image.fromarray(shades), format)) == [0, 1, 128, 255]


def test_one_grey_of_sixteen_bits_may_be_transparent():
    shades = Image.fromarray(np.array([[300, 32896]], np.uint16))
    assert grey(saved(shades, "PNG", transparency=300)) == [255, 128]


def test_grey_of_which_zero_is_white_is_inverted():
    shades = Image.fromarray(np.array([[0, 32896, 65535]], np.uint16))
    data = bytearray(saved(shades, "TIFF"))
    at = data.index(struct.pack("<HHI", 262, 3, 1)) + 8  # the entry of PhotometricInterpretation: tag, type, count
    data[at] = 0
    assert grey(bytes(data)) == [255, 127, 0]


def test_floats_are_shades_between_black_and_white():
    assert grey(saved(Image.fromarray(np.array([[0, 0.5, 1]], np.float32)), "TIFF")) == [0, 128, 255]


@pytest.mark.parametrize(
    ("pixels", "reason"),
    [
        (np.array([[0, 2.0]], np.float32), "floats outside of 0 .black. to 1 .white."),
        (np.array([[0, np.nan]], np.float32), "floats outside"),
        (np.array([[0, 70_000]], np.int32), "integers of 32 bits .* without a defined white"),
    ],
)
def test_pixels_without_a_defined_white_are_refused(pixels, reason):
    with pytest.raises(MediaError, match=reason):
        decode_picture(saved(Image.fromarray(pixels), "TIFF"), MediaSection())


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "0 bytes: is empty"),
        (b"no video", "8 bytes: cannot be decoded: Invalid data"),
        (mp4()[:500], "500 bytes: is cut off: it has 500 bytes of at least"),
    ],
    ids=["empty", "no video", "cut off"],
)
def test_a_damaged_video_is_an_error_of_its_row(data, reason):
    with pytest.raises(MediaError, match=reason):
        decode_video(data, MediaSection())


def test_large_frames_are_refused():
    with pytest.raises(MediaError, match=r"frames of 32 x 24 pixels, more than data\.media\.max_decoded_pixels = 700"):
        decode_video(mp4(), MediaSection(max_decoded_pixels=700))


@pytest.fixture
def family(tmp_path):
    return family_of(make("qwen3_vl"), tmp_path)


@pytest.mark.parametrize(
    ("limits", "size"),
    [
        ({}, (64, 64)),
        ({"max_pixels": 1024}, (32, 32)),
        ({"max_pixels": 600}, (24, 24)),
        ({"min_pixels": 5000}, (64, 64)),
    ],
)
def test_pictures_are_resized_to_the_limits_of_the_recipe(family, limits, size):
    """Patches of 4 pixels; the checkpoint's limits are 64 and 4096 pixels."""
    shown = picture(100, 100, seed=0)
    found = family.image(shown, MediaSection(**limits))
    assert (4 * found.grid[1], 4 * found.grid[2]) == size
    assert family.image(picture(8, 8, seed=0), MediaSection(min_pixels=1000)).grid == (1, 8, 8)


def test_frames_are_resized_to_the_limits_of_the_recipe(family):
    """24 x 32 pixels each; the checkpoint's limits of all frames are 64 and 8192 pixels."""
    for limits, pixels in (
        ({}, 24 * 32),
        ({"max_pixels": 400}, 16 * 16),
        ({"total_pixels": 2400}, 16 * 24),
        ({"min_pixels": 1200}, 32 * 40),
        ({"min_pixels": 1200, "total_pixels": 1536}, 16 * 16),
    ):
        item = family.video(video(frames=4), MediaSection(**limits))
        assert item.grid[0] == 2
        assert 16 * item.grid[1] * item.grid[2] == pixels, limits
        assert len(item.pixels) == 2 * item.grid[1] * item.grid[2]


def test_limits_of_the_recipe_are_those_of_the_processors_file(family, tmp_path):
    """The same pixels as with the limits in preprocessor_config.json."""
    file = tmp_path / "preprocessor_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "size": {"shortest_edge": 900, "longest_edge": 1500}}))
    written = find_family(str(tmp_path), make("qwen3_vl").config)
    for side in (12, 36, 100):
        shown = picture(side, side + 5, seed=side)
        found = family.image(shown, MediaSection(min_pixels=900, max_pixels=1500))
        assert found.digest == written.image(shown).digest


def test_a_family_of_tiles_refuses_limits_of_size(tmp_path):
    tiled = family_of(make("idefics3"), tmp_path)
    with pytest.raises(UserError, match="max_pixels, total_pixels: idefics3 takes pictures in tiles of one size"):
        tiled.image(picture(16, 16, seed=0), MediaSection(max_pixels=100))


@pytest.mark.parametrize(
    ("limits", "reason"),
    [
        ({"min_pixels": 9, "max_pixels": 4}, "min_pixels = 9 is above"),
        ({"min_frames": 9, "max_frames": 4}, "min_frames"),
    ],
)
def test_limits_must_be_ranges(limits, reason):
    with pytest.raises(ValidationError, match=reason):
        MediaSection(**limits)


def test_a_still_video_has_the_patches_of_its_picture(family):
    still = picture(32, 40, seed=4)
    found = family.video(Video(frames=np.stack([np.asarray(still)] * 2), times=np.arange(2.0), fps=1.0, duration=2.0))
    np.testing.assert_array_equal(found.pixels, family.image(still).pixels)


def test_the_time_of_each_step_of_a_video_is_text(family):
    item = family.video(video(frames=5))
    assert item.grid[0] == 3
    assert [part.partition(" ")[0] for part in family.expansion(item).split("<|vision_end|>")[:-1]] == [
        "<0.2",
        "<1.2",
        "<2.0",
    ]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (
            "what ?",
            r"1 pictures and .* template writes none of .* <\|image_pad\|>: set data\.chat_template",
        ),
        ("<|image_pad|> <|image_pad|>", "2 placeholders in the chat, and 1 pictures"),
        ("<|vision_start|><|video_pad|><|vision_end|>", "kind 'video' where the row has 'image'"),
    ],
)
def test_placeholders_must_fit_the_pictures(family, text, reason):
    with pytest.raises(ValueError, match=reason):
        expand_spans([text], [family.image(picture(16, 16, seed=0))], family)


def test_other_numbers_of_tokens_are_refused(family):
    with pytest.raises(ValueError, match="2 placeholder tokens, and 4 outputs"):
        view_of(np.array([5, 5]), [family.image(picture(16, 16, seed=0))], family)


def test_an_error_names_the_row(family, tmp_path):
    vision = Vision(family=family, limits=MediaSection(root=str(tmp_path)))
    with pytest.raises(MediaError, match=r"rows.jsonl:3: image: missing.png: No such file"):
        vision.item({"type": "image", "image": "missing.png"}, where="rows.jsonl:3")


def test_pictures_of_a_column_come_before_the_text():
    config = LLMDataConfig(path="rows.jsonl", image_column="picture")
    row = normalise({"prompt": "what ?", "picture": ["a.png", "b.png"]}, where="row 1", config=config)
    (message,) = row["prompt"]
    assert [part["type"] for part in message["content"]] == ["image", "image", "text"]
    assert (
        normalise({"prompt": "what ?", "picture": None}, where="row 1", config=config)["prompt"][0]["content"]
        == "what ?"
    )
    with pytest.raises(UserError, match=r"row 1: no column 'picture' \(data.image_column\)"):
        normalise({"prompt": "what ?"}, where="row 1", config=config)


@pytest.mark.parametrize(
    ("part", "location"),
    [
        ({"type": "image", "image": "a.png"}, "a.png"),
        ({"type": "image", "url": "file:///a.png"}, "file:///a.png"),
        ({"type": "image_url", "image_url": {"url": "data:;base64,AA=="}}, "data:;base64,AA=="),
        ({"type": "image_url", "image_url": "a.png"}, "a.png"),
        ({"type": "input_image", "image_url": "a.png"}, "a.png"),
        ({"type": "image", "base64": "AA=="}, {"bytes": "AA=="}),
    ],
)
def test_parts_of_messages_have_one_form(part, location):
    config = LLMDataConfig(path="rows.jsonl")
    row = normalise({"prompt": [{"role": "user", "content": [part]}]}, where="row 1", config=config)
    assert row["prompt"][0]["content"] == [{"type": "image", "image": location}]


@pytest.mark.parametrize("part", [{"type": "audio"}, {"type": "image_url", "image_url": {}}, {"type": "video_url"}])
def test_a_part_of_another_form_is_refused(part):
    config = LLMDataConfig(path="rows.jsonl")
    with pytest.raises(UserError, match=r"row 1: a part of a message must be"):
        normalise({"prompt": [{"role": "user", "content": [part]}]}, where="row 1", config=config)


def test_a_part_with_text_has_either_name():
    parts = [{"type": "text", "text": "what ?"}, {"type": "input_text", "text": "what ?"}]
    config = LLMDataConfig(path="rows.jsonl")
    row = normalise({"prompt": [{"role": "user", "content": parts}]}, where="row 1", config=config)
    assert row["prompt"][0]["content"] == parts[:1] * 2

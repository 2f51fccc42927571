"""The gallery: files on disk, read back."""

import io
import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from cosmos_rl_core.errors import MediaError
from cosmos_rl_core.observe.gallery import AnswerGallery, Gallery
from cosmos_rl_core.observe.pages import PAPER, PageRow, animation, as_gif, contact_grid, fit_clip
from cosmos_rl_core.types import Prompt, Rollout, RolloutGroup


def make_group(
    sample: int = 17, *, rewards=(0.1, 0.9), frames: int = 4, size: int = 16, step: int = 1, **row
) -> RolloutGroup:
    """Rollout i is a clip of one grey, 20 i, that grows brighter by `step` a frame."""
    rollouts = []
    for i, reward in enumerate(rewards):
        greys = 20 * i + step * np.arange(frames)
        video = np.broadcast_to(greys[:, None, None, None], (frames, size, size, 3)).astype(np.uint8)
        rollouts.append(
            Rollout(
                arrays={},
                rollout_logprobs=np.zeros(2, np.float32),
                versions=np.array([3, 4], np.int32),
                loss_mask=np.ones(2, bool),
                reward=reward,
                reward_breakdown={"brightness": reward},
                media={"video": video},
            )
        )
    return RolloutGroup(prompt=Prompt(sample_id=sample, row={"caption": "a disc", **row}), rollouts=tuple(rollouts))


def read_film(path: Path) -> tuple[list[np.ndarray], float]:
    import av

    with av.open(str(path)) as container:
        rate = container.streams.video[0].average_rate
        return [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)], float(rate)


def index(directory: Path, name: str = "index.jsonl") -> list[dict]:
    return [json.loads(line) for line in (directory / name).read_text().splitlines()]


def make_answers(sample=3, *, rewards=(0.0, 1.0), media=None):
    """A question about pictures, answered in text."""
    media = media if media is not None else {"image": np.full((16, 24, 3), 200, np.uint8)}
    rollouts = tuple(
        Rollout(
            arrays={},
            rollout_logprobs=np.zeros(1, np.float32),
            versions=np.zeros(1, np.int32),
            loss_mask=np.ones(1, bool),
            text=f"answer {place}",
            reward=reward,
            reward_breakdown={"exact": reward},
            media=media,
        )
        for place, reward in enumerate(rewards)
    )
    locations = {name: f"{name}.png" for name in media}
    row = {"prompt": [{"role": "user", "content": "which colour?"}]}
    return RolloutGroup(prompt=Prompt(sample_id=sample, row=row), rollouts=rollouts, media=locations)


def size_of(path):
    with Image.open(path) as opened:
        return opened.size


def answers(directory, **keys):
    return AnswerGallery(directory, question=lambda group: group.prompt.row["prompt"][0]["content"], **keys)


def test_answers_are_shown_beside_the_pictures_of_their_prompt(tmp_path):
    file = answers(tmp_path).save(4, make_answers())
    assert file == tmp_path / "step_000004/sample_3.png"
    with Image.open(file) as opened:
        shown = np.asarray(opened)
    assert shown.shape == (146, 218, 3)  # 9 pixels each, and a hairline
    assert (shown[1:-1, 1:-1] == 200).all()
    record = json.loads(file.with_suffix(".json").read_text())
    assert record["caption"] == "which colour?"
    assert record["prompt_media"] == {"image": "image.png"}
    assert [(line["response"], line["reward"]) for line in record["rollouts"]] == [("answer 0", 0.0), ("answer 1", 1.0)]
    (line,) = index(tmp_path)
    assert (line["file"], line["grid"]) == ("step_000004/sample_3.png", "step_000004/grid.png")


def test_a_grid_has_a_line_for_each_question(tmp_path):
    gallery = answers(tmp_path, groups_per_step=2)
    film = np.zeros((30, 16, 16, 3), np.uint8)
    heights = []
    for sample, media in enumerate(({"image": film[0]}, {"image": film[0], "video": film}, {"image": film[0]})):
        kept = gallery.save(0, make_answers(sample, media=media))
        assert (kept is None) == (sample == 2)
        heights.append(size_of(tmp_path / "step_000000/grid.png")[1])
    assert heights[0] < heights[1] == heights[2]
    assert size_of(tmp_path / "step_000000/sample_1.png")[0] == 9 * 226 + 8 * 6  # 8 frames of the video


def test_prompts_of_text_are_not_in_the_gallery_nor_are_media_that_are_gone(tmp_path):
    class Gone(dict):
        def values(self):
            raise MediaError("a.png: No such file")

    gallery = answers(tmp_path)
    assert gallery.save(0, make_answers(media={})) is None
    assert gallery.save(0, make_answers(media=Gone(image=None))) is None
    assert not gallery.wants(0, make_answers(media={})) and gallery.wants(0, make_answers())
    assert not list(tmp_path.iterdir())


def test_a_group_becomes_film_record_sheets_and_a_line_of_the_index(tmp_path):
    video = Gallery(tmp_path).save(12, make_group())
    folder = tmp_path / "step_000012"
    assert video == folder / "sample_17.mp4"
    assert {path.name for path in folder.iterdir()} == {"sample_17.mp4", "sample_17.json", "grid.png", "grid.gif"}
    assert index(tmp_path) == [
        {
            "step": 12,
            "sample": 17,
            "caption": "a disc",
            "file": "step_000012/sample_17.mp4",
            "grid": "step_000012/grid.gif",
            "reward_mean": 0.5,
            "reward_max": 0.9,
        }
    ]


def test_the_film_has_the_frames_and_the_rate_of_the_clips(tmp_path):
    frames, rate = read_film(Gallery(tmp_path).save(0, make_group(frames=5, fps=4)))
    assert (len(frames), rate) == (5, 4.0)


def test_a_long_clip_is_thinned_and_lasts_as_long(tmp_path):
    frames, rate = read_film(Gallery(tmp_path).save(0, make_group(frames=192)))
    assert (len(frames), rate) == (48, 2.0)


def test_the_record_holds_what_is_known_of_each_rollout_in_its_own_order(tmp_path):
    Gallery(tmp_path).save(3, make_group(rewards=(0.1, float("nan"))))
    record = json.loads((tmp_path / "step_000003/sample_17.json").read_text())
    assert record["rollouts"] == [
        {"reward": 0.1, "rewards": {"brightness": 0.1}, "advantage": 0.0, "versions": [3, 4]},
        {"reward": None, "rewards": {"brightness": None}, "advantage": 0.0, "versions": [3, 4]},
    ]


def test_an_image_is_kept_as_png(tmp_path):
    page = Gallery(tmp_path).save(0, make_group(frames=1))
    assert page.name == "sample_17.png"
    names = {path.name for path in page.parent.iterdir()}
    assert names == {"sample_17.png", "sample_17.json", "grid.png"}
    assert index(tmp_path)[0]["grid"] == "step_000000/grid.png"


def test_a_step_keeps_as_many_groups_as_it_may(tmp_path):
    gallery = Gallery(tmp_path, groups_per_step=2)
    saved = [gallery.save(5, make_group(sample)) for sample in (1, 2, 3)]
    assert [video is not None for video in saved] == [True, True, False]
    assert gallery.save(6, make_group(4)) is not None
    assert [line["sample"] for line in index(tmp_path)] == [1, 2, 4]


def test_only_some_steps_are_kept(tmp_path):
    gallery = Gallery(tmp_path, every_steps=10)
    assert [gallery.wants(step, make_group()) for step in (0, 1, 9, 10)] == [True, False, False, True]
    assert gallery.save(1, make_group()) is None and not any(tmp_path.iterdir())


def test_a_step_long_past_gets_no_more_groups(tmp_path):
    gallery = Gallery(tmp_path)
    for step in range(4, 10):
        gallery.save(step, make_group())
    assert gallery.save(6, make_group(18)) is not None
    assert gallery.save(5, make_group(18)) is None


def test_of_a_large_group_best_and_worst_are_shown(tmp_path):
    Gallery(tmp_path).save(0, make_group(rewards=(0.5, 0.1, 0.9, 0.3, 0.6, 0.7, 0.8, 0.4, 0.2, 0.0), frames=1))
    with Image.open(tmp_path / "step_000000/grid.png") as grid:
        colours = {colour for _, colour in grid.convert("RGB").getcolors(1 << 20)}
    assert {(40, 40, 40), (180, 180, 180)} <= colours  # 0.9 and 0.0
    assert len({(20 * i,) * 3 for i in range(10)} & colours) == 8


def test_two_processes_share_a_directory(tmp_path):
    for number in (0, 1):
        Gallery(tmp_path, name=f"rollout-{number}").save(0, make_group(number))
    assert [line["sample"] for line in index(tmp_path, "index_rollout-1.jsonl")] == [1]
    assert (tmp_path / "step_000000/grid_rollout-0.png").is_file()


def test_a_group_without_clips_is_an_error_and_leaves_nothing(tmp_path):
    group = make_group()
    bare = Rollout(arrays={}, rollout_logprobs=np.zeros(0), versions=np.zeros(0, np.int32), loss_mask=np.zeros(0, bool))
    with pytest.raises(ValueError, match="this rollout has none"):
        Gallery(tmp_path).save(0, RolloutGroup(prompt=group.prompt, rollouts=(*group.rollouts, bare)))
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("option", [{"groups_per_step": 0}, {"every_steps": 0}])
def test_counts_of_nothing_are_refused(tmp_path, option):
    with pytest.raises(ValueError, match="must be above 0"):
        Gallery(tmp_path, **option)


# Pages.


@pytest.mark.parametrize(
    ("size", "cell", "shown"),
    [((16, 16), 96, (96, 96)), ((64, 64), 96, (128, 128)), ((720, 1280), 96, (54, 96)), ((96, 48), 96, (96, 48))],
)
def test_clips_are_brought_to_the_size_of_a_cell(size, cell, shown):
    assert fit_clip(np.zeros((2, *size, 3), np.uint8), cell=cell, max_frames=8).shape == (2, *shown, 3)


def test_small_clips_are_enlarged_pixel_by_pixel():
    video = np.random.default_rng(0).integers(0, 256, (1, 8, 8, 3), dtype=np.uint8)
    large = fit_clip(video, cell=32, max_frames=1)
    assert (large[:, ::4, ::4] == video).all() and (large[:, 3::4, 3::4] == video).all()


def make_row(*, clips: int = 3, frames: int = 4, title: str = "a disc") -> PageRow:
    greys = [60 * i + 20 * np.arange(frames - i) for i in range(clips)]
    videos = tuple(np.tile(grey.astype(np.uint8)[:, None, None, None], (1, 32, 32, 3)) for grey in greys)
    return PageRow(title=title, clips=videos, labels=tuple((f"{i}.00", "brightness 0.1") for i in range(clips)))


def test_pages_of_a_film_are_alike_in_size_and_even():
    pages = animation([make_row(), make_row(clips=1, title="a very long caption " * 30)])
    assert len(pages) == 4
    assert len({page.size for page in pages}) == 1
    assert pages[0].width % 2 == pages[0].height % 2 == 0


def test_frames_of_all_rows_of_a_sheet_stand_under_one_another():
    short, long = make_row(), PageRow(title="b", clips=make_row().clips, labels=(("0.1", "a much longer label"),) * 3)
    edges = []
    for rows in ([short, long], [long, short]):
        pixels = np.asarray(contact_grid(rows))
        edges.append((pixels[:, :, 0] == 208).sum(axis=0).nonzero()[0][0])
    assert edges[0] == edges[1]


def test_a_gif_keeps_pages_and_paper():
    pages = animation([make_row(frames=4)])
    with Image.open(io.BytesIO(as_gif(pages, fps=10))) as video:
        assert (video.n_frames, video.size, video.info["duration"]) == (4, pages[0].size, 100)
        video.seek(2)
        assert video.convert("RGB").getpixel((1, 1)) == PAPER

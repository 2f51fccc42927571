"""The stream of clips: the same after every restart, and a clip that is bad is named, skipped and counted once."""

import threading

import numpy as np
import pytest

from cosmos_rl_core.errors import UserError
from cosmos_rl_core.types import Share
from cosmos_rl_wfm.data.clips import ClipReader, ClipStream, DecodedClips
from cosmos_rl_wfm.data.config import WFMDataConfig
from cosmos_rl_wfm.data.rows import load_rows
from cosmos_rl_wfm.data.video import Clip, ClipError, write_video

ROWS = [{"key": f"row-{number}", "number": number} for number in range(10)]


def read(row, rng):
    """A row's number and a random one, standing for where a clip is cut."""
    if row.get("bad"):
        raise ClipError(f"{row['key']}: is damaged")
    return row["number"], int(rng.integers(1000))


def spoilt(*numbers):
    return [{**row, "bad": row["number"] in numbers} for row in ROWS]


def take(count, *, rows=ROWS, **keys):
    with ClipStream(rows, read=read, seed=3, workers=2, ahead=5, **keys) as stream:
        return [next(stream) for _ in range(count)]


def test_an_epoch_has_every_row_once_and_the_next_one_another_order():
    numbers = [number for number, _ in take(20)]
    assert sorted(numbers[:10]) == sorted(numbers[10:]) == list(range(10))
    assert numbers[:10] != numbers[10:]


def test_without_shuffling_rows_come_in_order():
    assert [number for number, _ in take(12, shuffle=False)] == [*range(10), 0, 1]


def test_a_row_is_cut_elsewhere_in_the_next_epoch():
    clips = take(20)
    first, second = dict(clips[:10]), dict(clips[10:])
    assert sum(first[number] != second[number] for number in range(10)) >= 8


@pytest.mark.parametrize("state", [1, 9, 10, 17])
@pytest.mark.parametrize("rows", [ROWS, spoilt(2, 5, 6)])
def test_a_stream_goes_on_where_it_was(rows, state):
    whole = take(25, rows=rows)
    with ClipStream(rows, read=read, seed=3, state=state) as stream:
        assert [next(stream) for _ in range(25 - state)] == whole[state:]
        assert stream.state == 25


def test_the_number_of_threads_changes_nothing():
    for workers, ahead in ((1, 1), (4, 16)):
        with ClipStream(ROWS, read=read, seed=3, workers=workers, ahead=ahead) as stream:
            assert [next(stream) for _ in range(15)] == take(15)


def test_shares_are_the_whole_between_them():
    parts = [take(8, share=Share(index=index, count=3)) for index in range(3)]
    assert [clip for clips in zip(*parts) for clip in clips] == take(24)


def test_a_bad_clip_gives_its_place_to_the_next_row():
    rows, bad = spoilt(4), next(place for place, (number, _) in enumerate(take(10)) if number == 4)
    clips, whole = take(10, rows=rows), take(10)
    assert [number for number, _ in clips][bad] == whole[(bad + 1) % 10][0]
    assert [clip for place, clip in enumerate(clips) if place != bad] == [
        clip for place, clip in enumerate(whole) if place != bad
    ]


def test_a_bad_clip_is_tried_once_named_and_counted(caplog):
    tried = []

    def count(row, rng):
        tried.append(row["number"])
        return read(row, rng)

    with ClipStream(spoilt(4, 7), read=count, seed=3, workers=1) as stream:
        for _ in range(40):
            next(stream)
        assert stream.skipped == {"row-4": "row-4: is damaged", "row-7": "row-7: is damaged"}
    assert (tried.count(4), tried.count(7)) == (1, 1)
    assert sorted(message.partition(": ")[2] for message in caplog.messages) == [
        "row-4: is damaged",
        "row-7: is damaged",
    ]
    assert caplog.messages[1].startswith("skipped, 2 of 10 rows so far")


def test_rows_that_are_all_bad_are_the_users_error_and_not_tried_for_ever():
    with ClipStream(spoilt(*range(10)), read=read, seed=3, ahead=1) as stream:
        for _ in range(2):
            with pytest.raises(UserError, match=r"none of 10 rows gives a clip: row-\d: is damaged; .*; \.\.\."):
                next(stream)
        assert stream.state == 0


def test_other_errors_are_told_at_their_place_and_nothing_is_skipped():
    def refuse(row, rng):
        if row["number"] == 2:
            raise UserError("the store refuses")
        return read(row, rng)

    with ClipStream(ROWS, read=refuse, seed=3, shuffle=False) as stream:
        assert [next(stream)[0] for _ in range(2)] == [0, 1]
        with pytest.raises(UserError, match="the store refuses"):
            next(stream)
        assert stream.skipped == {}


def test_clips_are_read_ahead_and_closing_waits_for_the_threads():
    begun, go = threading.Semaphore(0), threading.Event()

    def wait(row, rng):
        begun.release()
        go.wait(20)
        return row["number"]

    with ClipStream(ROWS, read=wait, seed=3, workers=3, ahead=6, shuffle=False) as stream:
        taker = threading.Thread(target=next, args=(stream,))
        taker.start()
        assert all(begun.acquire(timeout=20) for _ in range(3))
        go.set()
        taker.join(20)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("clips")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Five clips of 12 frames, one of 4, and one that is none."""
    root = tmp_path_factory.mktemp("clips")
    (root / "metas").mkdir()
    (root / "videos").mkdir()
    for number in range(7):
        (root / f"metas/{number}.txt").write_text(f"clip {number}")
        video = np.full((4 if number == 5 else 12, 24, 40, 3), 30 * number, np.uint8)
        write_video(root / f"videos/{number}.mp4", video, fps=8)
    (root / "videos/6.mp4").write_bytes(b"no video")
    return root


def config(folder, **keys):
    size = {"frames": 9, "height": 16, "width": 16}
    return WFMDataConfig.model_validate({"path": str(folder), "size": size, **keys})


def test_clips_of_a_folder_are_decoded_and_the_short_and_the_damaged_one_skipped(folder):
    rows, _ = load_rows(config(folder))
    with ClipStream(rows, read=ClipReader(config(folder)), seed=1) as stream:
        clips = [next(stream) for _ in range(14)]
        assert stream.skipped.keys() == {"5", "6"}
        assert "5.mp4: is too short for 9 frames: it has 4" in stream.skipped["5"]
        assert "6.mp4: cannot be decoded" in stream.skipped["6"]
    for clip in clips:
        assert clip.video.shape == (9, 16, 16, 3) and clip.fps == 8
        assert abs(clip.video.mean() - 30 * int(clip.row["key"])) < 4
        assert clip.caption == clip.row["caption"]


def test_captions_are_dropped_at_their_share(folder):
    rows, _ = load_rows(config("", kind="mock", mock={"embedding_tokens": 2}))
    reader = ClipReader(config("", kind="mock", mock={"embedding_tokens": 2}, caption_dropout=0.25))
    clips = [reader(rows[0], np.random.default_rng(seed)) for seed in range(400)]
    dropped = [clip.caption == "" for clip in clips]
    assert 70 <= sum(dropped) <= 130
    assert all((clip.text is None) == without for clip, without in zip(clips, dropped))


def test_a_wrong_embedding_is_a_fault_of_its_row(folder, tmp_path):
    np.save(tmp_path / "x.npy", np.zeros(3))
    rows, _ = load_rows(config(folder, limit=1))
    row = {**rows[0], "text_embedding": str(tmp_path / "x.npy")}
    with (
        ClipStream([row], read=ClipReader(config(folder)), seed=1, ahead=1) as stream,
        pytest.raises(UserError, match=r"x\.npy"),
    ):
        next(stream)


def test_a_prompt_alone_is_no_clip(folder):
    with pytest.raises(ClipError, match=r"p\.txt:1: is a prompt alone"):
        ClipReader(config(folder))({"key": "p.txt:1", "caption": "x", "video": ""}, np.random.default_rng(0))


def test_a_missing_file_is_a_fault_of_its_row(folder, tmp_path):
    row = {"key": "gone", "caption": "x", "video": str(tmp_path / "gone.mp4")}
    for place in ({}, {"video_at": [0, 10]}):
        with pytest.raises(ClipError, match=r"gone.*No such file"):
            ClipReader(config(folder))({**row, **place}, np.random.default_rng(0))


def test_mock_data_flows_through_all_of_it():
    mock = config(
        "", kind="mock", mock={"rows": 6, "embedding_tokens": 3, "embedding_width": 8}, buckets=["16x16", "8x24"]
    )
    rows, _ = load_rows(mock)
    with ClipStream(rows, read=ClipReader(mock, text_width=8), seed=0) as stream:
        clips = [next(stream) for _ in range(6)]
    assert {clip.video.shape for clip in clips} == {(9, 16, 16, 3), (9, 8, 24, 3)}
    assert all(clip.text is not None and clip.text.shape == (3, 8) for clip in clips)


def test_clips_that_begin_where_they_always_do_are_decoded_once(tmp_path):
    path = tmp_path / "clip.mp4"
    write_video(path, np.zeros((4, 16, 16, 3), np.uint8), fps=8)
    row = {"video": str(path), "key": "clip", "caption": "", "fps": 0.0}
    config = {"path": str(tmp_path), "size": {"frames": 4, "height": 16, "width": 16}}
    first = ClipReader(WFMDataConfig.model_validate({**config, "start": "first"}))
    anywhere = ClipReader(WFMDataConfig.model_validate({**config, "start": "random"}))
    clips = [reader.clip(row, np.random.default_rng(0)).video for reader in (first, anywhere)]
    path.unlink()
    assert np.array_equal(first.clip(row, np.random.default_rng(1)).video, clips[0])
    with pytest.raises(ClipError):
        anywhere.clip(row, np.random.default_rng(1))


def test_only_so_many_decoded_clips_are_kept():
    held = DecodedClips(max_bytes=100)
    small, large = (Clip(video=np.zeros(size, np.uint8), fps=8.0) for size in (60, 90))
    held.put("small", small)
    held.put("large", large)
    assert held.get("small") is small
    assert held.get("large") is None

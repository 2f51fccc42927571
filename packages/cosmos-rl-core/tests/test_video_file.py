"""What the headers of a video file tell of its being cut off."""

import struct

import pytest

from cosmos_rl_core.video_file import cut_off


def box(kind, content=b"", *, size=None):
    return struct.pack(">I4s", 8 + len(content) if size is None else size, kind) + content


WHOLE = box(b"ftyp", b"isom") + box(b"mdat", bytes(100)) + box(b"moov", bytes(40))
LONG = box(b"ftyp", b"isom") + struct.pack(">I4sQ", 1, b"mdat", 116) + bytes(100)
NO_INDEX = "has no index (moov): the recording or the copy was ended before it was written"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (WHOLE, ""),
        (WHOLE[:-1], "is cut off: it has 167 bytes of at least 168"),
        (WHOLE[:60], "is cut off: it has 60 bytes of at least 120"),
        (WHOLE[:120], NO_INDEX),
        (WHOLE[:123], "is cut off: it has 123 bytes of at least 128"),
        (LONG, NO_INDEX),
        (LONG[:-1], "is cut off: it has 127 bytes of at least 128"),
        (box(b"moov", bytes(40)) + box(b"mdat", bytes(9), size=0), ""),
        (WHOLE + bytes(20), ""),
        (b"", "is empty: it has 0 bytes"),
        (b"RIFF" + struct.pack("<I", 92) + bytes(92), ""),
        (b"RIFF" + struct.pack("<I", 92) + bytes(40), "is cut off: it has 48 bytes of at least 100"),
        (b"RIFF" + b"\xff" * 4 + bytes(40), ""),
        (b"garbage" * 50, ""),
        (b"\x1aE\xdf\xa3" + bytes(40), ""),
    ],
)
def test_headers_tell_where_a_file_was_cut(content, said, tmp_path):
    (tmp_path / "a").write_bytes(content)
    assert cut_off(content) == cut_off(tmp_path / "a") == cut_off(str(tmp_path / "a")) == said


def test_a_file_that_is_not_there_is_not_cut_off(tmp_path):
    assert cut_off(tmp_path / "gone.mp4") == ""

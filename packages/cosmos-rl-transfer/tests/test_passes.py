"""Both hashes of a bucket, in every way to compute them."""

import math
import time
from statistics import median

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from cosmos_rl_core import kernel_choice
from cosmos_rl_transfer.content import digest, passes
from cosmos_rl_transfer.content.passes import WAYS, Part, copied_and_hashed
from cosmos_rl_transfer.layout.manifest import Box, whole_box

WIDTHS = [np.uint8, np.uint16, np.uint32, np.uint64]
EVERY_WAY = WAYS["contiguous"]


def random_tensor(shape, width, seed=0):
    rng = np.random.default_rng(seed)
    return np.frombuffer(rng.bytes(math.prod(shape) * np.dtype(width).itemsize), width).reshape(shape).copy()


def wanted_of(parts):
    packed = b"".join(np.ascontiguousarray(part.source).tobytes() for part in parts)
    sums = tuple(digest.box_sum(part.source, part.box, part.shape) if part.box.numel else 0 for part in parts)
    return xxhash.xxh3_64_intdigest(packed), sums


@st.composite
def boxes(draw):
    """A tensor's shape, a box in it, and a box of the same size in an array that holds it."""
    shape, offset, size, held, at = [], [], [], [], []
    for _ in range(draw(st.integers(0, 3))):
        extent = draw(st.sampled_from([1, 2, 3, 8, 40, 96, 320]))
        before, behind, low, high = (draw(st.sampled_from([0, 0, 1, 8, 64])) for _ in range(4))
        shape.append(before + extent + behind)
        offset.append(before)
        size.append(extent)
        held.append(low + extent + high)
        at.append(low)
    return tuple(shape), Box(tuple(offset), tuple(size)), tuple(held), Box(tuple(at), tuple(size))


@settings(max_examples=200, deadline=None)
@given(st.lists(boxes(), min_size=1, max_size=3), st.sampled_from(WIDTHS), st.sampled_from(["pack", "scatter", "hash"]))
def test_every_way_gives_the_same_hashes_and_copies_every_element(cases, width, direction):
    if any(math.prod(held) > 1 << 18 for _, _, held, _ in cases):
        return
    for way in EVERY_WAY:
        parts, wholes = [], []
        for i, (shape, box, held, inside) in enumerate(cases):
            whole = random_tensor(held, width, seed=i)
            view, packed = whole[(*inside.slices(), ...)], random_tensor(box.shape, width, seed=10 + i)
            if direction == "hash":
                view = packed
            pair = {"pack": (view, packed), "scatter": (packed, view), "hash": (packed, None)}[direction]
            parts.append(Part(*pair, box, shape))
            wholes.append((whole, view, whole.copy()))
        wanted = wanted_of(parts)
        assert copied_and_hashed(parts, way=way) == wanted
        for part, (whole, view, before) in zip(parts, wholes):
            assert part.target is None or np.array_equal(part.target, part.source)
            changed = int(np.count_nonzero(whole != before))
            assert changed <= (view.size if direction == "scatter" else 0)


@pytest.mark.parametrize("words", [31, 32, 40, 127, 128, 129, 2047, 2049, 32768, 32771, 70000])
@pytest.mark.parametrize("first", [0, 8, 2045])
def test_compiled_ways_take_words_at_any_place_of_a_tensor(words, first):
    pytest.importorskip("cosmos_rl_transfer.content.compiled")
    box, shape = Box((first,), (words,)), (first + words,)
    source = random_tensor((words,), np.uint64)
    source.flags.writeable = False  # a publisher's slot
    for way in EVERY_WAY:
        out = np.zeros(words, np.uint64)
        part = Part(source, out, box, shape)
        assert copied_and_hashed([part], way=way) == wanted_of([part])
        assert np.array_equal(out, source)


def test_buckets_of_whole_stripes_are_taken_by_the_compiled_ways(monkeypatch):
    pytest.importorskip("cosmos_rl_transfer.content.compiled")
    shape, box = (64, 4096), Box((3, 1024), (50, 2048))
    rows = random_tensor(shape, np.uint16)[box.slices()]
    parts = [
        Part(rows, np.zeros(box.shape, np.uint16), box, shape),
        Part(random_tensor((35,), np.uint64), np.zeros(35, np.uint64), whole_box((35,)), (35,)),
    ]
    wanted = wanted_of(parts)
    monkeypatch.setattr(passes, "_copy_then_hash", None)
    assert copied_and_hashed(parts, way="fused") == copied_and_hashed(parts, way="in blocks") == wanted


@pytest.fixture
def measured_anew(tmp_path, monkeypatch):
    """No choice is known, neither to this process nor to its user."""
    monkeypatch.setenv("COSMOS_RL_CACHE", str(tmp_path))
    monkeypatch.setattr(kernel_choice, "_choices", {})
    passes.fastest.cache_clear()
    yield
    passes.fastest.cache_clear()


def seconds_of(runs, rounds):
    """Medians of alternating runs, in seconds of this thread on the processor: other processes do not count."""
    times = {name: [] for name in runs}
    for _ in range(rounds + 1):
        for name, run in runs.items():
            started = time.thread_time()
            run()
            times[name].append(time.thread_time() - started)
    return {name: median(row[1:]) for name, row in times.items()}


@pytest.mark.parametrize("kind", list(WAYS))
def test_the_chosen_way_is_not_slower_than_a_copy_and_two_hashes(kind, measured_anew):
    pytest.importorskip("cosmos_rl_transfer.content.compiled")
    way, plain = passes.fastest(kind), WAYS[kind][0]
    buckets = passes.samples(kind)
    runs = {w: lambda w=w: [copied_and_hashed(parts, way=w) for parts in buckets] for w in {way, plain}}
    seconds = seconds_of(runs, rounds=41)
    assert seconds[way] <= 1.02 * seconds[plain]


def test_the_choice_is_made_at_start_and_followed(measured_anew, monkeypatch):
    pytest.importorskip("cosmos_rl_transfer.content.compiled")
    chosen = {"contiguous": "fused", "rows": "in blocks", "in place": "copy then hash"}
    asked = []
    monkeypatch.setattr(
        kernel_choice, "fastest", lambda name, _, code: asked.append(name) or chosen[name.split(", ")[1]]
    )
    passes.prepare()
    assert [name.split(", ")[1] for name in asked] == list(WAYS)
    taken = []
    monkeypatch.setattr(passes, "_in_one_pass", lambda _, moves, block_words: taken.append(block_words))
    monkeypatch.setattr(passes, "_copy_then_hash", lambda parts: taken.append("apart"))
    for kind in WAYS:
        copied_and_hashed(passes.samples(kind)[0])
    assert taken == [0, 32768, "apart"]

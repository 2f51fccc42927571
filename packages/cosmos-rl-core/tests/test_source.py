"""The prompt stream."""

import pytest

from cosmos_rl_core.data.source import PromptSource
from cosmos_rl_core.errors import UserError

ROWS = [{"question": f"q{i}"} for i in range(7)]


def source(**keys):
    return PromptSource(ROWS, **{"origin": "train.jsonl", "seed": 3, **keys})


def epoch(stream, number):
    """The rows of one epoch, in order."""
    return [stream[i].row["question"] for i in range(number * len(ROWS), (number + 1) * len(ROWS))]


def test_without_shuffling_the_rows_come_in_file_order_every_epoch():
    stream = source(shuffle=False)
    assert epoch(stream, 0) == epoch(stream, 4) == [row["question"] for row in ROWS]


@pytest.mark.parametrize("number", [0, 1, 12])
def test_an_epoch_has_each_row_once(number):
    assert sorted(epoch(source(), number)) == [row["question"] for row in ROWS]


def test_every_epoch_and_every_seed_has_an_order_of_its_own():
    orders = {tuple(epoch(source(seed=seed), number)) for seed in (3, 4) for number in range(3)}
    assert len(orders) == 6


def test_another_instance_gives_the_same_prompts():
    assert [source()[i] for i in range(30)] == [source()[i] for i in range(30)]


def test_reading_back_and_forth_gives_what_reading_in_order_gives():
    ids = [20, 0, 13, 7, 6, 20, 1]
    stream, in_order = source(), [source()[i] for i in range(21)]
    assert [stream[i] for i in ids] == [in_order[i] for i in ids]


def test_the_stream_is_endless_unless_epochs_end_it():
    stream = source()
    assert stream.total is None
    assert stream[10**9].sample_id == 10**9


def test_after_the_last_epoch_there_is_nothing():
    stream = source(epochs=2)
    assert (stream.total, len(stream), stream[13].sample_id) == (14, 7, 13)
    with pytest.raises(IndexError, match=r"sample 14 is after the last epoch \(2\)"):
        stream[14]


def test_the_origin_is_the_line_of_the_row():
    for prompt in map(source().__getitem__, range(14)):
        assert ROWS[int(prompt.origin.removeprefix("train.jsonl:")) - 1] is prompt.row


def test_rows_that_are_left_out_are_never_prompts_and_the_others_keep_their_lines():
    stream = source(skip=2, shuffle=False, epochs=2)
    assert (len(stream), stream.total) == (5, 10)
    assert [stream[i].row for i in range(10)] == [*ROWS[2:], *ROWS[2:]]
    assert [stream[i].origin for i in (0, 4, 5)] == ["train.jsonl:3", "train.jsonl:7", "train.jsonl:3"]
    assert ROWS[0]["question"] not in {source(skip=2)[i].row["question"] for i in range(50)}


def test_no_rows_are_refused_with_their_origin():
    with pytest.raises(UserError, match=r"empty.jsonl has no rows"):
        PromptSource([], origin="empty.jsonl")


def test_the_slow_prompts_that_come_next_end_with_the_stream():
    stream = source(epochs=2, shuffle=False, is_slow=lambda row: row is not ROWS[1])
    assert [prompt.sample_id for prompt in stream.upcoming(-1, 3)] == [0, 2]
    last = 2 * len(ROWS) - 1
    assert [prompt.sample_id for prompt in stream.upcoming(last - 1, 3)] == [last]
    assert stream.upcoming(last, 3) == []
    assert source(epochs=2).upcoming(-1, 3) == []  # nothing is slow unless the domain says so

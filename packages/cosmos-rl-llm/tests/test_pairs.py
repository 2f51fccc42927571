"""Rows with two answers, or with a judged one: what a microbatch has of them, and which rows are refused."""

import json

import pytest
from digit_chat import TEMPLATE, collate, make_chat, words

from cosmos_rl_core.errors import UserError
from cosmos_rl_core.types import Share
from cosmos_rl_llm.config import LLMDataConfig
from cosmos_rl_llm.data.rows import load_rows
from cosmos_rl_llm.data.spans import LABEL, PAIR

PAIRS = {"chosen_column": "chosen", "rejected_column": "rejected"}


def load(tmp_path, rows, **keys):
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return load_rows(LLMDataConfig(path=str(file), **keys))[0]


def test_both_answers_are_rollouts_of_one_microbatch():
    rows = [{"prompt": "12", PAIR: ["34", "5"]}, {"prompt": "6", PAIR: ["7", "8"]}]
    batch = collate(rows, make_chat())
    (microbatch,) = batch.microbatches
    assert words(microbatch.inputs["tokens"]) == list("1234" + "125" + "67" + "68")
    assert words(microbatch.inputs["labels"]) == ["3", "4", "</s>", "5", "</s>", "7", "</s>", "8", "</s>"]
    assert microbatch.terms.rollout_index.tolist() == [0, 0, 0, 1, 1, 2, 2, 3, 3]
    assert microbatch.terms.preference is not None
    assert microbatch.terms.preference.tolist() == [2, -2, 2, -2]
    assert (batch.num_terms, batch.num_rollouts, batch.mismatched) == (9, 4, ())


def test_no_share_separates_a_pair():
    rows = [{"prompt": "1", PAIR: [str(n) * (1 + n % 4), "0"]} for n in range(1, 10)]
    kinds = []
    for index in range(3):
        share = Share(index=index, count=3, multiple=2)
        for microbatch in collate(rows, make_chat(), microbatch_terms=8, share=share).microbatches:
            preference = microbatch.terms.preference
            assert preference is not None
            kinds += preference.tolist()
            assert preference.tolist() == [2, -2] * (len(preference) // 2) or preference.tolist() == [0]
    assert kinds.count(2) == kinds.count(-2) == 9


def test_an_answer_has_the_same_key_in_another_batch():
    first, second = {"prompt": "1", PAIR: ["2", "3"]}, {"prompt": "4", PAIR: ["2", "3"]}
    keys = [
        microbatch.terms.rollout_keys
        for rows in ([first, second], [second, first])
        for microbatch in collate(rows, make_chat()).microbatches
    ]
    assert keys[0] is not None and keys[1] is not None
    assert keys[0].tolist() == keys[1][[2, 3, 0, 1]].tolist()
    assert len(set(keys[0].tolist())) == 4


def test_judged_rows_have_answers_of_their_neighbours_beside_them():
    rows = [
        {"prompt": "1", "response": "2", LABEL: True},
        {"prompt": "3", "response": "4", LABEL: False},
        {"prompt": "5", "response": "6", LABEL: False},
    ]
    batch = collate(rows, make_chat())
    preference = batch.microbatches[0].terms.preference
    assert preference is not None and preference.tolist() == [3, -1.5, -1.5]
    (mismatched,) = batch.mismatched
    assert words(mismatched.inputs["tokens"]) == list("163254")
    assert mismatched.terms.preference is None


def test_a_pair_that_only_differs_after_the_limit_is_dropped():
    rows = [{"prompt": "12", PAIR: ["345", "346"]}, {"prompt": "1", PAIR: ["2", "3"]}]
    batch = collate(rows, make_chat(max_length=4, overlong="truncate"))
    assert batch.num_rollouts == 2
    assert batch.rows_dropped == ("a row of 6 tokens, more than 4; it begins '12'",)


def test_a_pair_that_is_too_long_is_an_error():
    with pytest.raises(UserError, match="a row of 5 tokens is longer than the context of 4: raise"):
        collate([{"prompt": "1", PAIR: ["2", "345"]}], make_chat(max_length=4))


def test_columns_are_named_by_keys(tmp_path):
    (row,) = load(
        tmp_path,
        [{"q": "1", "good": "2", "bad": [{"role": "assistant", "content": "3"}]}],
        prompt_column="q",
        chosen_column="good",
        rejected_column="bad",
    )
    assert row["prompt"] == [{"role": "user", "content": "1"}]
    assert row[PAIR] == ["2", "3"]


def test_the_prompt_is_what_two_chats_have_in_common(tmp_path):
    shared = [{"role": "system", "content": "0"}, {"role": "user", "content": "1"}]
    chats = {
        name: [*shared, {"role": "assistant", "content": text}] for name, text in [("chosen", "2"), ("rejected", "3")]
    }
    (row,) = load(tmp_path, [chats], prompt_column="", **PAIRS)
    assert row["prompt"] == shared
    assert row[PAIR] == ["2", "3"]
    batch = collate([row], make_chat(TEMPLATE))
    assert words(batch.microbatches[0].inputs["labels"]) == ["2", "</s>", "3", "</s>"]


def test_the_prompt_is_what_two_texts_have_in_common(tmp_path):
    keys = {"prompt_column": "", "chat_template": "none", **PAIRS}
    (row,) = load(tmp_path, [{"chosen": "12 34", "rejected": "12 35"}], **keys)
    assert (row["prompt"], row[PAIR]) == ("12 3", ["4", "5"])


@pytest.mark.parametrize(
    ("row", "error"),
    [
        (
            {"prompt": "1", "chosen": "2", "rejected": "2"},
            r"rows\.jsonl:1: the chosen and the rejected answer are equal",
        ),
        ({"prompt": "1", "chosen": "", "rejected": "2"}, r"rows\.jsonl:1: the response is empty \(data\.chosen_column"),
        ({"prompt": "1", "chosen": "2"}, r"rows\.jsonl:1: no column 'rejected' \(data\.rejected_column\); there are"),
        ({"prompt": "1", "chosen": 3, "rejected": "2"}, r"the response must be a string .*data\.chosen_column"),
    ],
)
def test_a_wrong_pair_is_named_with_its_row(tmp_path, row, error):
    with pytest.raises(UserError, match=error):
        load(tmp_path, [row], **PAIRS)


@pytest.mark.parametrize(
    ("row", "error"),
    [
        ({"chosen": "12", "rejected": "32"}, "have no common beginning"),
        ({"chosen": "12", "rejected": [{"role": "user", "content": "1"}]}, "both answers must be chats"),
    ],
)
def test_chats_without_a_common_prompt_are_refused(tmp_path, row, error):
    with pytest.raises(UserError, match=error):
        load(tmp_path, [row], prompt_column="", chat_template="none", **PAIRS)


def test_a_label_is_true_or_false(tmp_path):
    keys = {"response_column": "completion", "label_column": "label"}
    rows = [{"prompt": "1", "completion": "2", "label": label} for label in (True, 0)]
    assert [row[LABEL] for row in load(tmp_path, rows, **keys)] == [True, False]
    with pytest.raises(UserError, match=r"rows\.jsonl:1: a label must be true for a good response .* not str 'good'"):
        load(tmp_path, [{"prompt": "1", "completion": "2", "label": "good"}], **keys)


@pytest.mark.parametrize(
    "keys",
    [{"chosen_column": "chosen"}, {**PAIRS, "response_column": "response"}, {"label_column": "label"}],
)
def test_keys_of_pairs_that_do_not_fit_together_are_refused(keys):
    with pytest.raises(ValueError, match=r"set both|remove messages_column|needs response_column"):
        LLMDataConfig(path="x.jsonl", **keys)

import datetime
import decimal
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import ValidationError

from cosmos_rl_core.data.source import PromptSource, UsableRows
from cosmos_rl_core.domain_base import DomainBase
from cosmos_rl_core.errors import UserError
from cosmos_rl_core.parallel.setup import ModelSetup
from cosmos_rl_llm.config import LLMDataConfig
from cosmos_rl_llm.data.rows import load_rows, read_located
from cosmos_rl_llm.domain import LLM
from cosmos_rl_llm.tiny import write_sums, write_tiny_model

QUESTION = {"question": "What is 6 times 7?", "answer": "6 times 7 is 42.\n#### 42"}


def write_jsonl(path: Path, *rows: object) -> Path:
    path.write_text("\n".join(json.dumps(row) for row in rows), encoding="utf-8")
    return path


def write_parquet(path: Path, rows: list) -> Path:
    pyarrow = pytest.importorskip("pyarrow", reason="an extra of the package")
    pytest.importorskip("pyarrow.parquet").write_table(pyarrow.Table.from_pylist(rows), path)
    return path


def load(path: Path, **keys):
    return load_rows(LLMDataConfig(path=str(path), **keys))


def test_a_string_prompt_becomes_a_user_message(tmp_path):
    rows, origin = load(write_jsonl(tmp_path / "a.jsonl", {"prompt": "Hi"}))
    assert rows == [{"prompt": [{"role": "user", "content": "Hi"}]}]
    assert origin == "a.jsonl"


def test_without_a_chat_template_the_prompt_stays_text(tmp_path):
    rows, _ = load(write_jsonl(tmp_path / "a.jsonl", {"prompt": "2+2="}), chat_template="none")
    assert rows[0]["prompt"] == "2+2="


def test_the_system_prompt_comes_first_unless_there_is_one(tmp_path):
    own = [{"role": "system", "content": "Own."}, {"role": "user", "content": "Hi"}]
    file = write_jsonl(tmp_path / "a.jsonl", {"prompt": "Hi"}, {"prompt": own})
    rows, _ = load(file, system_prompt="Be brief.")
    assert rows[0]["prompt"][0] == {"role": "system", "content": "Be brief."}
    assert rows[1]["prompt"] == own


def test_template_answer_pattern_and_response_column(tmp_path):
    rows, _ = load(
        write_jsonl(tmp_path / "a.jsonl", QUESTION),
        prompt_template="{question} End with {{####}}.",
        answer_column="answer",
        answer_pattern="#### (.*)",
        response_column="answer",
    )
    assert rows[0]["prompt"][0]["content"] == "What is 6 times 7? End with {####}."
    assert rows[0]["answer"] == "42"
    assert rows[0]["response"] == QUESTION["answer"]
    assert rows[0]["question"] == QUESTION["question"]


def test_numbers_are_answers(tmp_path):
    rows, _ = load(write_jsonl(tmp_path / "a.jsonl", {"prompt": "p", "a": 42}), answer_column="a")
    assert rows[0]["answer"] == "42"


def test_limit_stops_before_later_faults(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_text('{"prompt": "p"}\n{broken')
    assert len(load(file, limit=1)[0]) == 1


def test_json_and_parquet_hold_the_same_rows(tmp_path):
    rows = [{"prompt": "a"}, {"prompt": "b"}]
    (tmp_path / "a.json").write_text(json.dumps(rows))
    write_parquet(tmp_path / "a.parquet", rows)
    assert load(tmp_path / "a.json")[0] == load(tmp_path / "a.parquet")[0]


def test_parquet_messages_are_messages(tmp_path):
    messages = [{"role": "user", "content": "Hi"}]
    write_parquet(tmp_path / "a.parquet", [{"prompt": messages}])
    assert load(tmp_path / "a.parquet")[0][0]["prompt"] == messages


def test_a_directory_is_read_file_by_file(tmp_path):
    write_jsonl(tmp_path / "part-1.jsonl", {"prompt": "b"})
    write_jsonl(tmp_path / "part-0.jsonl", {"prompt": "a"})
    rows, origin = load(tmp_path)
    assert [row["prompt"][0]["content"] for row in rows] == ["a", "b"]
    assert origin == tmp_path.name


def test_a_split_chooses_files_of_a_directory(tmp_path):
    write_jsonl(tmp_path / "train-0.jsonl", {"prompt": "a"})
    write_jsonl(tmp_path / "test.jsonl", {"prompt": "b"})
    assert load(tmp_path, split="test")[0][0]["prompt"][0]["content"] == "b"
    with pytest.raises(UserError, match=r"holds test, train; choose one with data.split"):
        load(tmp_path)
    with pytest.raises(UserError, match=r"no file of .* starts with it; there are: test.jsonl, train-0.jsonl"):
        load(tmp_path, split="validation")


def test_a_missing_file_is_named_with_its_neighbour(tmp_path):
    write_jsonl(tmp_path / "train.jsonl", {"prompt": "a"})
    with pytest.raises(UserError, match=r'trian.jsonl.*no such file.*Did you mean "train.jsonl"'):
        load(tmp_path / "trian.jsonl")


def test_a_missing_column_is_named_with_those_there(tmp_path):
    file = write_jsonl(tmp_path / "a.jsonl", QUESTION)
    with pytest.raises(UserError, match=r"a.jsonl:1: no column 'prompt' \(data.prompt_column\); there are: 'question'"):
        load(file)
    with pytest.raises(UserError, match=r'no column \'qestion\' .*Did you mean "question"'):
        load(file, prompt_template="{qestion}")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"prompt": "a"}\n\n{"prompt": ', r"a.jsonl:3: not valid JSON"),
        ("[1]", r"a.jsonl:1: a row must be an object"),
        ('{"prompt": 5}', r"a.jsonl:1: the prompt must be a string or a list of chat messages, not int 5"),
        ('{"prompt": "  "}', r"a.jsonl:1: the prompt is empty"),
        ('{"prompt": []}', r"a.jsonl:1: the prompt must be a string or a list"),
        ('{"prompt": [{"role": "user"}]}', r"a.jsonl:1: message 0 must be of the form"),
        ('{"prompt": [{"role": "me", "content": "x"}]}', r"a.jsonl:1: message 0: role must be one of"),
        ("", r"the dataset is empty"),
        ('{"prompt": "a"}\n{"prompt": "a", "n": %s}' % ("9" * 5000), r"a.jsonl:2: an integer of more than 4300 digits"),
        ('{"prompt": "a", "n": %s}' % ("[" * 200_000), r"a.jsonl:1: lists and objects are nested more than 100 deep"),
        ('{"prompt": "a", "score": NaN}', r"a.jsonl:1: NaN is not a number"),
        ('{"prompt": "a", "score": 1e999}', r"a.jsonl:1: 1e999 is larger than any float"),
        ('{"prompt": "a\\ud800"}', r"a.jsonl:1: half of a surrogate pair"),
    ],
    ids=lambda value: value[:40],
)
def test_a_faulty_row_is_named(tmp_path, content, message):
    file = tmp_path / "a.jsonl"
    file.write_text(content)
    with pytest.raises(UserError, match=message):
        load(file)


def test_generated_files_may_be_named_by_text(tmp_path):
    train, _ = write_sums(str(tmp_path / "sums"), below=2, held_out=1)
    assert len(load(train, answer_column="answer")[0]) == 3
    assert write_tiny_model(str(tmp_path / "model"), num_layers=1, hidden_size=8) == tmp_path / "model"


BAD = [5, "  ", [], [{"role": "user"}], None]


def test_bad_rows_are_dropped_and_counted_and_the_others_keep_their_numbers(tmp_path):
    bad = [{"prompt": prompt} for prompt in BAD]
    rows, origin = load(write_jsonl(tmp_path / "a.jsonl", {"prompt": "a"}, *bad, {"prompt": "b"}))
    assert [row["prompt"][0]["content"] for row in rows] == ["a", "b"]
    assert isinstance(rows, UsableRows)
    assert re.match(r"5 of 7 rows cannot be used; the first: .*a.jsonl:2: the prompt must be .* not int 5", rows.note)
    source = PromptSource(rows, origin=origin, skip=1, shuffle=False)
    assert [source[0].origin, source[1].origin] == ["a.jsonl:7", "a.jsonl:7"]


def test_a_dataset_without_enough_good_rows_is_refused(tmp_path):
    good, bad = {"prompt": "a"}, [{"prompt": ""}] * 9
    with pytest.raises(UserError, match=r"9 of 10 rows cannot be used; the first: .*a.jsonl:2: the prompt is empty"):
        load(write_jsonl(tmp_path / "a.jsonl", good, *bad))
    with pytest.raises(UserError, match=r"b.jsonl:1: the prompt is empty .*none of 9 rows so far can be used"):
        load(write_jsonl(tmp_path / "b.jsonl", *bad, good))


def test_an_endless_search_for_an_answer_drops_its_row(tmp_path):
    rows = [{"prompt": "p", "a": "a" * 40 + "!"}, {"prompt": "q", "a": "aa"}]
    rows, _ = load(write_jsonl(tmp_path / "a.jsonl", *rows), answer_column="a", answer_pattern="^((?:a+)+)$")
    assert [row["answer"] for row in rows] == ["aa"]
    assert isinstance(rows, UsableRows) and "has searched str 'aaaa" in rows.note


@pytest.mark.parametrize(
    ("row", "keys", "message"),
    [
        ({"a": None}, {"answer_column": "a"}, r"the answer must be a string or a number, not NoneType"),
        ({"a": "42"}, {"answer_column": "a", "answer_pattern": "#### (.*)"}, r"finds nothing in str '42'"),
        ({"r": ["x"]}, {"response_column": "r"}, r"the response must be a string or one assistant message"),
        ({"r": ""}, {"response_column": "r"}, r"the response is empty"),
    ],
)
def test_a_faulty_answer_or_response_is_named(tmp_path, row, keys, message):
    with pytest.raises(UserError, match=r"a.jsonl:1: .*" + message):
        load(write_jsonl(tmp_path / "a.jsonl", {"prompt": "p", **row}), **keys)


def test_a_parquet_file_that_is_none(tmp_path):
    pytest.importorskip("pyarrow", reason="an extra of the package")
    (tmp_path / "a.parquet").write_text("no parquet")
    with pytest.raises(UserError, match=r"not a readable parquet file"):
        load(tmp_path / "a.parquet")


def test_files_that_are_not_what_they_are_called(tmp_path):
    (tmp_path / "a.json").write_text('{"prompt": "a"}')
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "a.jsonl").write_bytes(b"\xff\xfe")
    for name, message in [
        ("a.json", r"must hold a list of rows"),
        ("a.txt", r"must end in .jsonl"),
        ("a.jsonl", r"a.jsonl:1: not a text in UTF-8"),
    ]:
        with pytest.raises(UserError, match=message):
            load(tmp_path / name)


def test_keys_that_do_not_apply_are_errors(tmp_path):
    file = write_jsonl(tmp_path / "a.jsonl", {"prompt": "a"})
    with pytest.raises(UserError, match=r"data.split = 'test' does not apply to one file"):
        load(file, split="test")
    with pytest.raises(UserError, match=r"data.subset is for a Hugging Face datasets id"):
        load(file, subset="main")


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"prompt_template": "{} is"}, r"literal braces"),
        ({"prompt_template": "\\boxed{"}, r"not a format string"),
        ({"answer_column": "a", "answer_pattern": "####.*"}, r"exactly one group"),
        ({"answer_column": "a", "answer_pattern": "("}, r"not a regular expression"),
        ({"answer_pattern": "(.*)"}, r"answer_pattern needs answer_column"),
        ({"system_prompt": "s", "chat_template": "none"}, r"system_prompt needs a chat template"),
        ({"prompt_template": "question"}, r"names no column, so that every prompt would be the same"),
        ({"system_prompt": "prompts/brief.txt"}, r"looks like the name of a file"),
        ({"chat_template": "auto"}, r"neither a template with"),
        ({"limits": 3}, r"Extra inputs"),
    ],
)
def test_a_faulty_config_is_refused(keys, message):
    with pytest.raises(ValidationError, match=message):
        LLMDataConfig(path="a.jsonl", **keys)


def test_the_domain_has_what_core_asks_for():
    assert isinstance(LLM, DomainBase)


def test_an_unknown_engine_or_option_is_an_error():
    model, data = LLM.Model(path="nowhere"), LLM.Data(path="a.jsonl")
    with pytest.raises(UserError, match=r"engine = 'vlm'.*known: torch"):
        LLM.build_engine(model, data=data, name="vlm", options={})
    with pytest.raises(UserError, match=r'rollout.options.max_sequence = 4: unknown key; did you mean "max_sequences"'):
        LLM.build_engine(model, data=data, name="torch", options={"max_sequence": 4})


def test_a_revision_is_not_for_a_directory(tmp_path):
    model, data = LLM.Model(path=str(tmp_path), revision="main"), LLM.Data(path="a.jsonl")
    with pytest.raises(UserError, match=r"model.revision is for a Hugging Face model id"):
        LLM.build_policy(model, data=data, sampling=None, seed=0, setup=ModelSetup())


def test_the_controller_loads_the_domain_without_torch():
    code = (
        "import sys, cosmos_rl_llm.domain;"
        "print(sorted({'torch', 'transformers', 'datasets', 'pyarrow', 'sympy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_byte_order_mark_is_skipped(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b"\xef\xbb\xbf" + json.dumps({"prompt": "a"}).encode())
    (tmp_path / "b.json").write_bytes(b"\xef\xbb\xbf" + json.dumps([{"prompt": "a"}]).encode())
    assert load(tmp_path / "a.jsonl")[0] == load(tmp_path / "b.json")[0]


ODD = {"when": datetime.date(2026, 1, 1), "price": decimal.Decimal("1.5"), "raw": b"ab", "log": [{"at": b"c"}], "n": 1}


def test_columns_of_a_table_that_are_not_json_are_read_if_a_key_names_them(tmp_path, caplog):
    file = write_parquet(tmp_path / "a.parquet", [{"prompt": "a", **ODD}])
    assert load(file, chat_template="none")[0] == [{"prompt": "a", "n": 1}]
    (record,) = caplog.records
    assert "a.parquet: columns that are not read" in record.getMessage()
    assert record.getMessage().endswith("when, price, raw, log")
    for keys in ({"answer_column": "when"}, {"prompt_template": "{when} {prompt}"}):
        with pytest.raises(UserError, match=r"a.parquet\[0\]: column 'when' holds date .*which is not JSON"):
            load(file, **keys)


def test_nulls_of_a_table_are_not_keys_of_messages(tmp_path):
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    other = {"type": "function", "function": {"name": "say", "arguments": {"b": "x"}}}
    plain, asks = {"role": "user", "content": "hi"}, {"role": "assistant", "content": None, "tool_calls": [call]}
    messages = [plain, asks, {"role": "assistant", "content": "", "tool_calls": [other]}]
    file = write_parquet(tmp_path / "a.parquet", [{"messages": messages}])
    (row,), _ = load(file, messages_column="messages")
    assert row["messages"] == [plain, {**asks, "content": ""}, messages[2]]
    (row,), _ = load(write_jsonl(tmp_path / "a.jsonl", {"prompt": [{**plain, "tool_calls": None, "name": None}]}))
    assert row["prompt"] == [plain]


def test_a_column_of_tools_is_read_as_schemas_or_their_text(tmp_path):
    tools = [{"type": "function", "function": {"name": "add"}}]
    rows = (
        {"prompt": "a", "tools": tools},
        {"prompt": "a", "tools": json.dumps(tools)},
        {"prompt": "a", "tools": None},
    )
    file = write_jsonl(tmp_path / "a.jsonl", *rows)
    assert [row.get("tools") for row in load(file)[0]] == [tools, tools, None]
    assert [row.get("tools") for row in load(file, tools_column="")[0]] == [None] * 3
    with pytest.raises(UserError, match=r"b.jsonl:1: tools must be a list of JSON schemas, not .*data.tools_column"):
        load(write_jsonl(tmp_path / "b.jsonl", {"prompt": "a", "tools": "hammer"}))


def test_csv_has_the_columns_of_its_first_row(tmp_path):
    file = tmp_path / "rows.csv"
    file.write_bytes('\ufeffprompt,answer\r\n"1,5 + ""2""?\nhow",3.5\r\n\r\nwhat?,"4"\r\n'.encode())
    config = LLMDataConfig(path=str(file), chat_template="none")
    assert [row for _, row in read_located(config)] == [
        {"prompt": '1,5 + "2"?\nhow', "answer": "3.5"},
        {"prompt": "what?", "answer": "4"},
    ]


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("prompt,answer\n1,2,3\n", "rows.csv:2: has 3 values for 2 columns"),
        ("prompt,answer\n1\n", "rows.csv:2: has 1 values for 2 columns"),
        ("prompt,prompt\n1,2\n", "rows.csv:1: the first row must name the columns, each once"),
        ("", "rows.csv:1: the first row must name the columns"),
        ('prompt,answer\n"1,2\n', "is not readable CSV in UTF-8: unexpected end of data"),
    ],
)
def test_a_damaged_csv_is_refused_with_its_line(tmp_path, text, wrong):
    (tmp_path / "rows.csv").write_text(text)
    with pytest.raises(UserError, match=re.escape(wrong)):
        list(read_located(LLMDataConfig(path=str(tmp_path / "rows.csv"), chat_template="none")))


def test_a_mistyped_split_names_the_one_that_is_meant(tmp_path):
    for name in ("train", "test"):
        (tmp_path / f"{name}.jsonl").write_text('{"prompt": "1"}\n')
    with pytest.raises(UserError, match='Did you mean "train"'):
        list(read_located(LLMDataConfig(path=str(tmp_path), split="trian", chat_template="none")))

"""`cosmos-rl serve` over the command line, with both engines, asked by OpenAI's client."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys

import openai
import pytest

from cosmos_rl_llm import write_tiny_model

pytestmark = [pytest.mark.ci, pytest.mark.timeout(900)]
CHAT = {"model": "any", "messages": [{"role": "user", "content": "1+1="}]}


@pytest.fixture(scope="module", params=["torch", pytest.param("vllm", marks=pytest.mark.xdist_group("vllm"))])
def client(request, tmp_path_factory):
    """Yield a client of a served model; Ctrl-C then ends the server with 130, and no error."""
    if request.param == "vllm":
        pytest.importorskip("vllm", reason="the extra cosmos-rl-llm[vllm] is not installed")
    model = write_tiny_model(tmp_path_factory.mktemp("serve") / "tiny")
    code = "from cosmos_rl_core.cli.main import main; main()"
    command = [sys.executable, "-c", code, "serve", str(model), "data.chat_template=none", "--port", "0"]
    command += ["--engine", request.param]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment, start_new_session=True)
    assert server.stderr is not None
    try:
        line = next(line for line in server.stderr if "http://" in line)
        with openai.OpenAI(base_url=line.split()[-1], api_key="none", max_retries=0) as asking:
            yield asking
        os.killpg(server.pid, signal.SIGINT)  # as a terminal does: vLLM's processes get it too
        assert "Traceback" not in server.stderr.read()
        assert server.wait(60) == 130
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)
        server.wait()
        server.stderr.close()


def contents(completion):
    return [choice.message.content for choice in completion.choices]


def test_the_clients_sampling_is_used(client):
    asked = {**CHAT, "n": 4, "seed": 3, "max_tokens": 12}
    first = client.chat.completions.create(**asked, logprobs=True)
    assert len(set(contents(first))) > 1
    assert contents(client.chat.completions.create(**asked)) == contents(first)
    assert contents(client.chat.completions.create(**{**asked, "seed": 4})) != contents(first)
    assert len(set(contents(client.chat.completions.create(**asked, temperature=0)))) == 1
    assert first.usage.completion_tokens == sum(len(choice.logprobs.content) for choice in first.choices)


def test_a_stream_has_all_choices(client):
    asked = {**CHAT, "n": 2, "seed": 3, "max_tokens": 8}
    whole, texts = contents(client.chat.completions.create(**asked)), ["", ""]
    for chunk in client.chat.completions.create(**asked, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == whole


def test_texts_are_completed_and_cut_at_a_stop(client):
    greedy = {"model": "any", "max_tokens": 8, "temperature": 0}
    [one, other] = client.completions.create(prompt=["1+1=", "2+"], **greedy).choices
    assert one.text != "" and [one.index, other.index] == [0, 1]
    stop = one.text[1]
    [cut] = client.completions.create(prompt="1+1=", stop=stop, **greedy).choices
    assert cut.finish_reason == "stop" and cut.text == one.text[: one.text.index(stop)]


@pytest.mark.parametrize("wrong", [{"prompt": "1" * 100}, {"prompt": [9999]}, {"prompt": "1", "echo": True}])
def test_a_wrong_request_is_one_error(client, wrong):
    with pytest.raises(openai.BadRequestError):
        client.completions.create(model="any", **wrong)
    assert client.models.list().data[0].id == "tiny"


@pytest.mark.parametrize("wrong", [{"temperature": -1}, {"max_tokens": 0}, {"n": 0}, {"stop": [""]}])
def test_wrong_sampling_is_refused(client, wrong):
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(**CHAT, **wrong)


@pytest.mark.slow
def test_lm_eval_measures_it(client, tmp_path):
    """lm-evaluation-harness as it is, by its command, on a task of a local file."""
    if shutil.which("lm_eval") is None:
        pytest.skip("lm-evaluation-harness is not installed: pip install 'lm_eval[api]'")
    prompts = ["1+1=", "2+3=", "12+7="]
    (tmp_path / "rows.jsonl").write_text(
        "".join(json.dumps({"prompt": each, "answer": "5"}) + "\n" for each in prompts)
    )
    task = {
        "task": "sums",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(tmp_path / "rows.jsonl")}},
    }
    task |= {"test_split": "test", "output_type": "generate_until", "doc_to_text": "{{prompt}}"}
    task |= {"doc_to_target": "{{answer}}", "metric_list": [{"metric": "exact_match"}]}
    task |= {"generation_kwargs": {"until": ["\n"], "max_gen_toks": 4, "do_sample": False}}
    (tmp_path / "sums.yaml").write_text(json.dumps(task))  # JSON is YAML
    arguments = f"model=any,base_url={client.base_url}completions,tokenizer_backend=None"
    command = ["lm_eval", "--model", "local-completions", "--tasks", "sums", "--include_path", str(tmp_path)]
    command += ["--model_args", arguments, "--output_path", str(tmp_path / "out"), "--log_samples"]
    environment = {**os.environ, "OPENAI_API_KEY": "none", "HF_HOME": str(tmp_path / "cache"), "HF_HUB_OFFLINE": "1"}
    subprocess.run(command, env=environment, check=True, capture_output=True, timeout=600)
    [samples] = (tmp_path / "out").rglob("samples_sums_*.jsonl")
    answers = {row["doc"]["prompt"]: row["resps"][0][0] for row in map(json.loads, samples.read_text().splitlines())}
    greedy = {"model": "any", "max_tokens": 4, "temperature": 0}
    assert answers == {each: client.completions.create(prompt=each, **greedy).choices[0].text for each in prompts}

"""What whole-run proofs and chaos tests share: small domains for a CPU, and the command as a user calls it."""

import contextlib
import json
import os
import shlex
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
import tomli_w

COMMAND = [sys.executable, "-c", "from cosmos_rl_core.cli.main import main; main()"]
FILE_SYNC = "cosmos_rl_core.testing.file_sync:FileSync"
CHARACTERS = "0123456789+="


def _changed(tables, changes):
    """Tables with `section__key=value` set in them; a second `__` goes one table deeper."""
    for dotted, value in changes.items():
        *sections, key = dotted.split("__")
        table = tables
        for section in sections:
            table = table.setdefault(section, {})
        table[key] = value
    return tables


@pytest.fixture(scope="session")
def bandit():
    """A recipe of the tiny domain: `bandit(directory, run__max_steps=3)`."""

    def recipe(directory, **changes):
        tables = {
            "run": {
                "domain": "cosmos_rl_core.testing.tiny:TINY",
                "name": "bandit",
                "output_dir": str(directory),
                "max_steps": 10,
            },
            "algorithm": {"name": "grpo"},
            "policy": {"prompts_per_step": 4, "threads": 1, "optimizer": {"learning_rate": 0.1}},
            "rollout": {"group_size": 4, "threads": 1, "sampling": {"max_tokens": 3}},
            "reward": {"functions": [{"name": "hits"}]},
            "logging": {"sinks": ["jsonl"]},
        }
        return _changed(tables, changes)

    return recipe


@pytest.fixture(scope="session")
def sums(qwen):
    """A recipe of a tiny Qwen3 that adds numbers: `sums(directory, run__max_steps=3)`."""

    def recipe(directory, **changes):
        data = {"path": str(qwen / "train.jsonl"), "chat_template": "none", "answer_column": "answer"}
        tables = {
            "run": {"domain": "llm", "name": "sums", "output_dir": str(directory), "max_steps": 10},
            "model": {"path": str(qwen)},
            "data": data,
            "algorithm": {"name": "grpo"},
            "policy": {"prompts_per_step": 4, "threads": 1, "optimizer": {"learning_rate": 1e-2}},
            "rollout": {"group_size": 4, "threads": 1, "sampling": {"max_tokens": 4}},
            "reward": {"functions": [{"name": "length", "options": {"max_tokens": 1, "slack_tokens": 3}}]},
            "logging": {"sinks": ["jsonl"]},
        }
        return _changed(tables, changes)

    return recipe


@pytest.fixture(scope="session")
def qwen(tmp_path_factory):
    """A directory with a Qwen3 of two layers, a tokenizer of single characters, and sums as rows."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    from cosmos_rl_llm.model.causal_lm import make_model

    directory = tmp_path_factory.mktemp("qwen")
    vocabulary = {token: i for i, token in enumerate(["<pad>", "<eos>", *CHARACTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")
    fast.save_pretrained(directory)
    shape = {
        "model_type": "qwen3",
        "vocab_size": len(vocabulary),
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "max_position_embeddings": 32,
        "tie_word_embeddings": True,
        "eos_token_id": 1,
        "pad_token_id": 0,
    }
    make_model(shape, dtype=torch.float32, seed=0).save_pretrained(directory)
    rows = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(7) for b in range(7)]
    (directory / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return directory


@pytest.fixture(scope="session")
def write_recipe():
    """Write tables as a TOML recipe and return its path."""

    def write(path: Path, tables) -> Path:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(tomli_w.dumps(tables))
        return path

    return write


@pytest.fixture(scope="session")
def start():
    """Start `cosmos-rl ...` in a process of its own and return it. command: what runs in place of it."""
    started = []

    def start(*arguments, command=COMMAND, **options):
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
        process = subprocess.Popen(
            [*command, *map(str, arguments)],
            env=environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pipesize=1 << 20,  # nobody reads before the end, and a full pipe stops the run
            **options,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        with process:  # waits for its end and closes the pipes
            process.kill()


@pytest.fixture(scope="session")
def wait_for():
    """Wait for a condition that other processes bring about: `value = wait_for(lambda: ..., "a sign of life")`."""

    def wait(condition, what, *, timeout_s=120.0):
        deadline = time.monotonic() + timeout_s
        while not (value := condition()):
            assert time.monotonic() < deadline, f"waited {timeout_s:g} s for {what}"
            time.sleep(0.02)
        return value

    return wait


@pytest.fixture(scope="session")
def pid_of():
    """The process of a worker of a run, from the process table; None where there is none."""

    def find(run_dir: Path, name: str) -> int | None:
        token = str(run_dir / "token").encode()
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with contextlib.suppress(OSError):  # it ended while we looked
                    words = (entry / "cmdline").read_bytes().split(b"\0")
                    if token in words and name.encode() in words:
                        return int(entry.name)
        return None

    return find


@pytest.fixture(scope="session")
def rank_pids():
    """The processes of the ranks of a replica of a run, by rank, from the process table."""

    def find(run_dir: Path, replica: str = "policy-0") -> dict[int, int]:
        wanted, found = {str(run_dir / "token").encode(), replica.encode(), b"cosmos_rl_core.workers.rank_main"}, {}
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with contextlib.suppress(OSError):  # it ended while we looked
                    words = (entry / "cmdline").read_bytes().split(b"\0")
                    if wanted <= set(words):
                        environment = (entry / "environ").read_bytes().split(b"\0")
                        rank = next(word for word in environment if word.startswith(b"RANK="))
                        found[int(rank.removeprefix(b"RANK="))] = int(entry.name)
        return found

    return find


@pytest.fixture
def controller(tmp_path, bandit, write_recipe, start):
    """Start a controller; return its process, its directory and the commands that it prints."""

    def begin(*flags, without=(), **changes):
        run_dir = tmp_path / "run"
        tables = bandit(run_dir, logging__sinks=["console", "jsonl"], **{"run__max_steps": 12, **changes})
        for name in without:
            del tables[name]
        process = start("controller", write_recipe(tmp_path / "run.toml", tables), *flags)
        commands = []
        for line in process.stdout:
            if line.strip().startswith("cosmos-rl worker"):
                commands.append(shlex.split(line.strip())[1:])
            if "on other machines by --controller" in line:
                break
        return process, run_dir, commands

    return begin


@pytest.fixture(scope="session")
def finished():
    """Wait for a process that must end with this exit code, and return its output and errors."""

    def wait(process, code=0, *, timeout_s=120):
        out, errors = process.communicate(timeout=timeout_s)
        assert process.returncode == code, out + errors
        return out, errors

    return wait


@pytest.fixture(scope="session")
def rows_of():
    """The objects of a .jsonl file."""

    def rows(path: Path):
        lines = path.read_text().split("\n")[:-1] if path.exists() else []  # a last line may be half written
        return [json.loads(line) for line in lines]

    return rows


@pytest.fixture(scope="session")
def journal_of():
    """The records of a run."""
    import msgspec

    from cosmos_rl_core.control.journal import read_segment, segment_firsts, segment_path
    from cosmos_rl_core.control.ledger import records

    decoder = msgspec.msgpack.Decoder(records.AnyRecord)

    def read(run_dir: Path):
        [first] = segment_firsts(run_dir / "journal")
        path = segment_path(run_dir / "journal", first)
        return [decoder.decode(body) for body, _ in read_segment(path, first=first, is_last=True)]

    return read


@pytest.fixture(scope="session")
def bits_of():
    """Weights and optimizer state of a checkpoint, to the bit, by file and name."""
    from safetensors.numpy import load_file

    def read(checkpoint: Path):
        files = sorted(checkpoint.rglob("*.safetensors"))
        assert len(files) >= 2
        return {
            (file.relative_to(checkpoint).as_posix(), name): array.tobytes()
            for file in files
            for name, array in load_file(file).items()
        }

    return read


SAMPLED = ("rollout", "reward", "sync")
"""Sections that a supervised run has no use for."""


@pytest.fixture(scope="session")
def demonstrations(tmp_path_factory):
    from cosmos_rl_vla.data.recording.record import record

    path = tmp_path_factory.mktemp("reach") / "demos"
    options = {"image_size": 16, "max_steps": 20}
    record(path, simulator="reach", tasks=("red",), episodes_per_task=2, options=options, processes=1, slots=1)
    return path


def _reach(demonstrations):
    """PPO of a tiny pi0.5, and imitation of the demonstrations."""
    model = {"family": "pi05", "action_dim": 2, "state_dim": 2, "horizon": 4, "num_steps": 2, "stats": "unit"}
    policy = {"prompts_per_step": 2, "microbatch_terms": 64, "threads": 1}
    rl = {
        "model": model,
        "data": {"simulator": "reach", "tasks": ["red"], "options": {"image_size": 16, "max_steps": 12}},
        "algorithm": {"name": "ppo"},
        "policy": policy,
        "rollout": {
            "group_size": 1,
            "threads": 1,
            "sampling": {"max_steps": 8},
            "options": {"processes": 1, "slots": 2},
        },
        "reward": {"functions": [{"name": "success"}]},
    }
    sft = {"model": model, "data": {"demos": str(demonstrations)}, "algorithm": {"name": "sft"}, "policy": policy}
    return {"rl": rl, "sft": sft}


@pytest.fixture
def recipe_of(request):
    """A small recipe of every domain: `recipe_of("llm", "sft")`."""
    return partial(_recipe, request)


def _recipe(request, domain, algorithm):
    if domain == "vla":
        tables = {"run": {"domain": "vla"}, **_reach(request.getfixturevalue("demonstrations"))[algorithm]}
    elif domain == "wfm":
        from wfm_fixtures import recipe

        tables = recipe()
    else:
        tables = request.getfixturevalue({"llm": "sums", "tiny": "bandit"}[domain])("unused")
    if algorithm == "sft" and domain != "vla":
        tables = {name: table for name, table in tables.items() if name not in SAMPLED}
        tables["algorithm"] = {"name": "sft"}
        if domain == "llm":
            tables["data"] = {**tables["data"], "response_column": "answer"}
    return {**tables, "logging": {"sinks": ["jsonl"]}}

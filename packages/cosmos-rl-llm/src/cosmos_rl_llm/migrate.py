"""Keys of language models in recipes of NVIDIA's Cosmos-RL, for `cosmos-rl migrate`."""

from __future__ import annotations

from pathlib import Path

from cosmos_rl_core.ops.migrate.common import POLICY, is_supervised
from cosmos_rl_core.ops.migrate.migration import DEFAULT, FILL_IN, Migration

MAX_LENGTH, MAX_TOKENS = 4096, 2048
"""The old defaults of policy.model_max_length and rollout.max_response_length."""
MAX_TURNS = 5
"""The old default of rollout.multi_turn_config.max_assistant_turns."""
TEST_SIZE = 0.1
"""The share of the rows that validation took where the old recipe names no others."""
JSD_BETA = 0.5
"""The old default of distillation.jsd_beta."""
ENGINES = {"vllm": "vllm", "vllm_async": "vllm", "trtllm": "vllm", "example_hf": "torch"}
"""Old rollout.backend -> the engine that samples from the same distribution."""
REWARDS = {
    "gsm8k": ("numeric", "#### (.*)"),
    "boxed_math": ("boxed", None),
}
"""Old reward -> reward and answer pattern."""


def migrate(old: Migration) -> None:
    """Carry over model, data, rewards, sampling and validation. The common keys are done."""
    length = old.take("policy.model_max_length") or MAX_LENGTH
    old.put("model.max_length", length)
    dataset = f"{POLICY}.dataset"
    _data(old, dataset)
    rows = old.take(f"{POLICY}.mini_batch")
    if is_supervised(old):
        old.put("data.messages_column", old.take(f"{POLICY}.conversation_column_name") or "conversations")
        old.notes["data.messages_column"] = "chats as {role, content}; ShareGPT's {from, value} must be renamed"
        old.put("policy.microbatch_terms", length * rows, f"{rows} rows of {length} tokens")
    else:
        _prompts(old, "data", dataset)
        if old.take("distillation.enable"):
            _teacher(old)
        else:
            _rewards(old)
        if "reward" in old.recipe and not old.see("train.non_text"):
            old.move(f"{POLICY}.min_filter_prefix_tokens", "algorithm.mask_prefix_terms", lambda value: max(0, value))
        _sampling(old, length=length, rows=rows)
        _episodes(old, length=length)
    _validation(old)
    _missing(old)


def _data(old: Migration, dataset: str) -> None:
    old.ask("data.path", old.take(f"{dataset}.name"), "rows came from a script: a file, or an id of the hub")
    old.put("data.subset", old.take(f"{dataset}.subset") or None)
    old.move(f"{dataset}.split", "data.split")


def _prompts(old: Migration, section: str, dataset: str) -> None:
    """The columns of a prompt, for training and evaluation."""
    old.ask(f"{section}.prompt_column", old.take(f"{POLICY}.prompt_column_name"), "column with the prompt")
    old.put(f"{section}.answer_column", old.take(f"{POLICY}.response_column_name") or None)
    _, pattern = REWARDS.get(str(old.see(f"{POLICY}.reward_function")), ("", None))
    old.put(f"{section}.answer_pattern", pattern)


def _rewards(old: Migration) -> None:
    named = old.take(f"{POLICY}.reward_function")
    weights = named if isinstance(named, dict) else dict.fromkeys([named] if isinstance(named, str) else named or [], 1)
    functions = [
        {"name": REWARDS.get(name, (name, None))[0], **({"weight": float(weight)} if weight != 1 else {})}
        for name, weight in weights.items()
    ]
    note = "" if functions else "came from a script: module:attribute of yours, or one of `cosmos-rl plugins`"
    old.put("reward.functions", functions or [{"name": "FILL_IN:reward"}], note)


def _teacher(old: Migration) -> None:
    """Distillation. Without a reward in the recipe the teacher is alone."""
    for source, target in (("model_name_or_path", "path"), ("model_revision", "revision"), ("param_dtype", "dtype")):
        old.move(f"distillation.{source}", f"teacher.{target}")
    old.move("distillation.kl_penalty_coef", "teacher.coef")
    if top_k := old.take("distillation.top_k"):
        old.put("teacher.loss", "divergence", "was part of the advantage, where it has no effect (docs/teachers.md)")
        old.put("teacher.top_k", top_k)
        beta = old.take("distillation.jsd_beta")
        old.put("teacher.beta", JSD_BETA if beta is None else beta)
    else:
        old.put("teacher.loss", "advantage")
        old.move("distillation.kl_discount_factor", "teacher.discount")
    if old.see(f"{POLICY}.reward_function") is None:
        old.put("teacher.task_coef", 0.0)
    else:
        _rewards(old)
    old.ignore("distillation.*", because="the teacher is in the policy's ranks, sharded as the policy")


def _sampling(old: Migration, *, length: int, rows: int) -> None:
    answer = old.take("rollout.max_response_length") or MAX_TOKENS
    old.put("rollout.sampling.max_tokens", answer)
    temperature = old.take("rollout.sampling_config.temperature") or old.see(f"{POLICY}.temperature")
    old.take(f"{POLICY}.temperature")
    old.put("rollout.sampling.temperature", temperature)
    old.move("rollout.sampling_config.top_p", "rollout.sampling.top_p")
    old.move("rollout.sampling_config.top_k", "rollout.sampling.top_k", lambda value: max(0, value))
    penalty = "rollout.sampling_config.repetition_penalty"
    old.move(penalty, "rollout.sampling.repetition_penalty", lambda value: None if value == 1 else value)
    old.put("policy.microbatch_terms", max(length * rows, length + 1), f"{rows} sequences of {length} tokens")
    _engine(old)
    old.move("rollout.parallelism.tp_size", "rollout.parallel.tp", lambda value: None if value == 1 else value)


def _episodes(old: Migration, *, length: int) -> None:
    """Episodes of several turns; the old limit of a response was that of one turn."""
    section = "rollout.multi_turn_config"
    if not old.take(f"{section}.enable"):
        return
    turns = old.take(f"{section}.max_assistant_turns") or MAX_TURNS
    answer = old.recipe["rollout"]["sampling"]["max_tokens"]
    if old.take(f"{section}.enable_tools"):
        old.put("environment.name", "tools")
        note = "tools came from a script: typed functions, as module:function (docs/tools.md)"
        old.put("environment.options.functions", [FILL_IN], note)
    else:
        old.put("environment.name", FILL_IN, "what answers the model: module:attribute of yours (docs/agents.md)")
    old.put("environment.max_turns", turns)
    old.put("environment.max_turn_tokens", answer)
    old.put("rollout.sampling.max_tokens", min(length, turns * answer), "of all turns and what is said between them")
    if template := old.take(f"{section}.custom_chat_template_path"):
        old.put("data.chat_template", str(Path(template).with_suffix(".jinja")), f"copy {template} to this file")
    old.ignore(f"{section}.*", because="turns follow each other as the chat template writes them")


def _engine(old: Migration) -> None:
    backend = str(old.take("rollout.backend"))
    engine = ENGINES.get(backend, FILL_IN)
    note = "" if backend == engine else f"was {backend}: the engines here are vllm and torch"
    old.put("rollout.engine", engine, note)
    if engine == "torch":
        settings = ("gpu_memory_utilization", "quantization", "enforce_eager", "enable_chunked_prefill")
        return old.ignore(*(f"rollout.{key}" for key in settings), because="a setting of vLLM")
    old.move("rollout.gpu_memory_utilization", "rollout.options.gpu_memory_utilization")
    old.move("rollout.quantization", "rollout.options.quantization", lambda value: None if value == "none" else value)
    old.move("rollout.enforce_eager", "rollout.options.enforce_eager")
    old.move("rollout.enable_chunked_prefill", "rollout.options.extra.enable_chunked_prefill")


def _validation(old: Migration) -> None:
    part = f"{POLICY}.dataset.test_size"
    if not old.take("validation.enable"):
        old.ignore("validation.*", part, because="validation was not enabled")
        return
    old.move("validation.freq", "eval.every_steps")
    old.move("validation.temperature", "eval.temperature")
    if not old.see("validation.dataset.name") and (is_supervised(old) or old.has(part)):
        old.put("eval.held_out", old.take(part) or TEST_SIZE, "" if old.has(part) else DEFAULT)
        old.ignore("validation.dataset.*", because="the first rows of [data] are held out")
        old.move("validation.dataset.test_size", "eval.limit")
    else:
        _held_out_rows(old)
        old.ignore(part, because="validation had rows of its own")
    if not is_supervised(old):
        old.move("validation.max_response_length", "eval.max_length")
        old.move("validation.top_p", "eval.top_p")
        old.move("validation.repetition_penalty", "eval.repetition_penalty")
        old.move("validation.top_k", "eval.top_k", lambda value: max(0, value))
        if old.see("validation.temperature") and not old.has("validation.top_k"):
            old.put("eval.top_k", 1, f"{DEFAULT}: the likeliest token at any temperature")


def _held_out_rows(old: Migration) -> None:
    """Rows of validation that are not those of training."""
    old.ask("eval.data.path", old.take("validation.dataset.name"), "the held-out rows")
    old.put("eval.data.subset", old.take("validation.dataset.subset") or None)
    old.move("validation.dataset.split", "eval.data.split")
    old.move("validation.dataset.test_size", "eval.limit")
    if is_supervised(old):
        old.put("eval.data.messages_column", old.recipe["data"]["messages_column"])
    else:
        _prompts(old, "eval.data", "validation.dataset")


def _missing(old: Migration) -> None:
    old.ignore("rollout.multi_turn_config.*", because="multi-turn was not enabled")
    old.ignore("distillation.*", because="distillation was not enabled")
    old.ignore("custom.*", because="a key of the entry script")

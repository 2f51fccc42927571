"""Checks of a language model's recipe before the start: tokenizer, lengths of rows, engine. No torch, no weights.

The tokenizer is read by `tokenizers` and the chat template is rendered by transformers' own function, so that lengths
are those of the run. Only the longest and the shortest rows are encoded.
"""

from __future__ import annotations

import heapq
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from cosmos_rl_core.algorithms.rules import needs_episodes
from cosmos_rl_core.data.source import UsableRows
from cosmos_rl_core.errors import PromptError, UserError
from cosmos_rl_core.gpus import machine_gpus
from cosmos_rl_core.imports import pip_install
from cosmos_rl_core.parallel.config import unmatched
from cosmos_rl_core.reward.specimen import text_specimen
from cosmos_rl_core.settings.base import Problem
from cosmos_rl_core.settings.problems import as_toml, missing_package, neighbour
from cosmos_rl_core.storage import hub
from cosmos_rl_core.storage.json_files import read_json_object
from cosmos_rl_core.storage.safetensors_header import weight_files
from cosmos_rl_llm.config import PLAIN_TEXT, ROUTES, LLMDataConfig, LLMLoraSection, LLMModelConfig
from cosmos_rl_llm.data.spans import LABEL, PAIR, SHOWS_NONE, shows_messages
from cosmos_rl_llm.engines.vllm.choice import refusals
from cosmos_rl_llm.engines.vllm.installed import vllm_platform, why_unfit
from cosmos_rl_llm.engines.vllm.options import install_vllm
from cosmos_rl_llm.media.preflight import media_problems
from cosmos_rl_llm.media.source import shows_media
from cosmos_rl_llm.model.checkpoint import (
    VOCABULARIES,
    legacy_template,
    model_folder,
    read_context,
    read_specs,
    template_text,
)

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from cosmos_rl_core.recipe.run import RunConfig
    from cosmos_rl_core.types import RolloutGroup, WeightSpec

LONGEST = 16
"""Rows that are encoded, those with the most characters."""
Rows = Sequence[Mapping[str, Any]]
_COLUMNS = {"chosen_column": ("pairs",), "label_column": ("labels", "steps"), "steps_column": ("steps",)}
"""Keys of [data] with the kinds of rows that they are read for."""


def find_problems(config: RunConfig, rows: Rows, held_out: Rows) -> Iterator[Problem]:
    """Yield problems of model, tokenizer, engine and rows."""
    yield from _of_preferences(config, rows)
    if not config.data.prompt_column and not config.has_episodes and config.data.chosen_column is None:
        wrong = "leaves the rows without a prompt, and there is no [environment] or [agent] that begins an episode"
        yield Problem(key="data.prompt_column", given='""', wrong=wrong, suggestion="name the column of the prompts")
    rows, held_out = _asked(rows, skip=len(held_out) if config.eval.held_out is not None else 0), _asked(held_out)
    directory = model_folder(config.model.path, config.model.revision)
    yield from _of_engine(config, directory)
    if config.teacher is not None and model_folder(config.teacher.path, config.teacher.revision) is None:
        yield from _of_hub("teacher", config.teacher.path, config.teacher.revision)
    if directory is None:
        yield from _of_hub("model", config.model.path, config.model.revision)
        return
    yield from _of_folder(config.model, directory)
    yield from media_problems(config.data, directory, rows=rows, held_out=held_out)
    yield from adapter_problems(config.model, directory)
    template = _template(directory, config.data)
    if template is None:
        yield Problem(
            key="data.chat_template",
            wrong=f"the tokenizer of {config.model.path} has no chat template",
            suggestion='set data.chat_template to one, or to "none" for plain text',
        )
    elif template and not shows_messages(partial(_rendered, template=template)):
        yield Problem(key="data.chat_template", given=as_toml(config.data.chat_template or "its own"), wrong=SHOWS_NONE)
    elif (directory / "tokenizer.json").is_file():
        yield from _of_lengths(config, directory, template, rows, held_out)


def _of_preferences(config: RunConfig, rows: Rows) -> Iterator[Problem]:
    """Columns of pairs and labels that the algorithm needs or does not read, and labels that are all the same."""
    name = config.algorithm.name
    by_reinforcement = (config.eval.loss_data, config.data_regularization.data)
    sections = {"data": config.data, "eval.data": config.eval.data}
    sections |= dict(zip(("eval.loss_data", "data_regularization.data"), by_reinforcement, strict=True))
    for section, data in sections.items():
        for key, kinds in _COLUMNS.items():
            if data is None or (getattr(data, key) is not None) == (config.trains_on in kinds):
                continue
            if config.trains_on in kinds:
                wrong, remedy = f'must be set for algorithm.name = "{name}"', "name the column"
            else:
                wrong, remedy = f'is not read with algorithm.name = "{name}"', "remove it"
            yield Problem(key=f"{section}.{key}", wrong=wrong, suggestion=remedy)
    scores = name in ("reward_model", "process_reward_model")
    if config.model.scores != scores:
        wrong = f'must be {str(scores).lower()} with algorithm.name = "{name}"'
        yield Problem(key="model.scores", given=str(not scores).lower(), wrong=wrong, suggestion="change it")
    if config.data.margin_column is not None and name != "reward_model":
        wrong = f'is not read with algorithm.name = "{name}"'
        yield Problem(key="data.margin_column", wrong=wrong, suggestion="remove it")
    labels = {row[LABEL] for row in rows if LABEL in row}
    if config.trains_on == "labels" and len(labels) == 1:
        wrong = f"is {str(*labels).lower()} in all {len(rows)} rows, and there is nothing to compare them with"
        yield Problem(key="data.label_column", given=as_toml(config.data.label_column), wrong=wrong)
    if config.trains_on == "labels" and config.policy.prompts_per_step < 2:
        wrong = "leaves no other row of the step, whose answer is the baseline"
        yield Problem(key="policy.prompts_per_step", given="1", wrong=wrong, suggestion="raise it")


def specimen(config: RunConfig, row: Mapping[str, Any], *, origin: str) -> RolloutGroup:
    """A group whose responses are the row's answer, with the tokens left at 0."""
    text = str(row.get("response") or row.get("answer") or "An answer.")
    arrays: dict[str, np.ndarray] = {"prompt_tokens": np.zeros(1, np.int32), "tokens": np.zeros(1, np.int32)}
    if shows_media(row.get("prompt")):
        arrays["item_grid"] = np.full((1, 3), 2, np.int32)
    return text_specimen(row, texts=[text] * config.rollout.group_size, origin=origin, arrays=arrays)


def _of_engine(config: RunConfig, directory: Path | None) -> Iterator[Problem]:
    if not config.is_sft:
        yield from _of_advantage(config)
    if config.has_episodes and config.rollout.options.get("record_routes"):
        wrong = "the experts of episodes, whose turns are requests of their own, are not recorded"
        yield Problem(key=ROUTES, given="true", wrong=wrong, suggestion="set it to false")
    if config.model.lora is not None:
        yield from missing_package("peft", key="model.lora", install=pip_install("cosmos-rl-llm[lora]"))
    if config.is_sft or config.rollout.engine != "vllm":
        return
    yield from missing_package("vllm", key="rollout.engine", given='"vllm"', install=install_vllm())
    yield from _of_build(config)
    yield from refusals(config, directory)


def _of_advantage(config: RunConfig) -> Iterator[Problem]:
    """Advantages of turns: there are turns with an environment alone, and there is no critic."""
    algorithm = config.algorithm
    if config.environment is None:
        yield from needs_episodes(algorithm, rollouts="a language model's rollouts without [environment]")
    elif algorithm.advantage == "gae" and algorithm.value_coef:
        yield Problem(
            key="algorithm.value_coef",
            given=str(algorithm.value_coef),
            wrong="trains a critic, which language models do not have",
            suggestion="set it to 0: the advantage of a turn is then the discounted rewards of it and of later ones",
        )


def _of_build(config: RunConfig) -> Iterator[Problem]:
    """Two builds of vLLM that are mixed, or that of the CPU beside this machine's GPUs, which the workers would get."""
    try:
        is_here = vllm_platform() == "cpu" and config.run.placement != "external"
        wrong = why_unfit("cpu", machine_gpus(os.environ, config.run.device) if is_here else [])
    except UserError as error:
        wrong = str(error)
    if wrong:
        wrong, _, remedy = wrong.partition("; ")
        yield Problem(key="rollout.engine", given='"vllm"', wrong=wrong, suggestion=remedy)


def _of_hub(section: str, path: str, revision: str | None) -> Iterator[Problem]:
    if wrong := hub.model_problem(path, revision):
        hint = neighbour(Path(path)) or "give a folder with config.json, weights and tokenizer"
        yield Problem(key=f"{section}.path", given=as_toml(path), wrong=wrong, suggestion=hint)


def _of_folder(model: LLMModelConfig, directory: Path) -> Iterator[Problem]:
    """The files of a model that is on this machine."""
    given = as_toml(model.path)
    if Path(model.path).expanduser().is_dir():
        if model.revision is not None:
            yield Problem(key="model.revision", given=as_toml(model.revision), wrong="is for a model id of the hub")
        if not weight_files(directory):
            yield Problem(key="model.path", given=given, wrong="has no weights in *.safetensors")
        if not any((directory / name).is_file() for name in VOCABULARIES):
            yield Problem(
                key="model.path",
                given=given,
                wrong="has no tokenizer",
                suggestion=f"add one of {', '.join(VOCABULARIES)}",
            )
    own = read_context(directory)
    if model.max_length is not None and own is not None and model.max_length > own:
        wrong = f"is above the model's own limit of {own} tokens"
        yield Problem(key="model.max_length", given=str(model.max_length), wrong=wrong)


def adapter_problems(model: LLMModelConfig, directory: Path) -> Iterator[Problem]:
    """Names of adapted layers that the model does not have."""
    lora = model.lora
    if lora is None or not any(unmatched(_matrices(read_specs(directory)), ends) for ends in _ends(lora).values()):
        return
    from cosmos_rl_llm.model.weights import specs_of_config  # exact, and slow: files may have other names than modules

    layers = _matrices(specs_of_config(directory))
    known = sorted({layer.rpartition(".")[2] for layer in layers if layer.count(".") > 2})
    for key, ends in _ends(lora).items():
        if missing := unmatched(layers, ends):
            yield Problem(
                key=f"model.lora.{key}",
                given=as_toml(getattr(lora, key)),
                wrong=f"no layer's name ends in {', '.join(missing)}",
                suggestion=f"the model's layers are {', '.join(known)}",
            )


def _ends(lora: LLMLoraSection) -> dict[str, tuple[str, ...]]:
    """The ends of names of layers that the keys of the section have."""
    targets = () if isinstance(lora.target_modules, str) else lora.target_modules
    patterns = {"rank_pattern": lora.rank_pattern, "alpha_pattern": lora.alpha_pattern}
    return {"target_modules": targets} | {key: tuple(pattern) for key, pattern in patterns.items()}


def _matrices(specs: Iterable[WeightSpec]) -> list[str]:
    return [spec.name.removesuffix(".weight") for spec in specs if len(spec.shape) == 2]


def _template(directory: Path, data: LLMDataConfig) -> str | None:
    """The chat template; "" for plain text, None if there is none."""
    if data.chat_template == PLAIN_TEXT:
        return ""
    if data.chat_template is not None:
        return template_text(data.chat_template)
    if (directory / "chat_template.jinja").is_file():
        return (directory / "chat_template.jinja").read_text(encoding="utf-8")
    settings, own = directory / "tokenizer_config.json", None
    if settings.is_file():
        own = read_json_object(settings, hint="see model.path").get("chat_template")
    if isinstance(own, list):
        own = next((each.get("template") for each in own if each.get("name") == "default"), None)
    return own if isinstance(own, str) else legacy_template(directory)


def _asked(rows: Rows, *, skip: int = 0) -> UsableRows:
    """The rows that have a prompt, with their numbers in the dataset, of which the first `skip` rows are not here."""
    numbers = rows.numbers if isinstance(rows, UsableRows) else range(skip + 1, skip + len(rows) + 1)
    places = [place for place, row in enumerate(rows) if row.get("prompt") != []]
    return UsableRows([rows[place] for place in places], [numbers[place] for place in places], "")


def _of_lengths(
    config: RunConfig, directory: Path, template: str, rows: UsableRows, held_out: UsableRows
) -> Iterator[Problem]:
    """Rows that do not fit into the context: an error if none fits, or where training does not skip them."""
    from tokenizers import Tokenizer

    limit = config.model.max_length or read_context(directory)
    if limit is None:
        return
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    new = 0 if config.is_sft else config.rollout.sampling.max_terms
    for key, section in (("data", rows), ("eval.data", held_out)):
        texts = [text for row in section if (text := _text(row, sft=config.is_sft)) is not None]
        if len(texts) < len(section) or not texts:  # pictures and videos have tokens of their own
            continue
        longest = heapq.nlargest(LONGEST, range(len(section)), key=lambda index: len(texts[index]))
        shortest = min(range(len(section)), key=lambda index: len(texts[index]))
        tokens: dict[int, int] = {}
        rejected: dict[int, str] = {}
        for index in dict.fromkeys((*longest, shortest)):
            try:
                tokens[index] = _length(section[index], tokenizer, template, config)
            except PromptError as error:
                rejected[index] = error.reason
        if rejected:
            place, reason = next(iter(rejected.items()))
            wrong = f"the chat template rejects rows of [{key}]: {reason}"
            if tokens:
                wrong = f"the chat template rejects row {section.numbers[place]} of [{key}], which is dropped: {reason}"
            given = as_toml(config.data.chat_template or "its own")
            yield Problem(key="data.chat_template", given=given, wrong=wrong, is_note=bool(tokens))
        if not tokens:
            continue
        most = max(tokens, key=tokens.__getitem__)
        if tokens[most] + new <= limit:
            continue
        where = f"row {section.numbers[most]}{_answer_of(section[most])} has {tokens[most]} tokens"
        more = f" and with up to {new} new ones exceeds" if new else ", more than"
        none_fits = min(tokens.values()) + new > limit
        tail = ", and so does the shortest row" if none_fits else "; rows that do not fit are dropped"
        if config.is_sft and config.data.overlong != "error":
            none_fits, tail = False, f'; such rows are handled by data.overlong = "{config.data.overlong}"'
        elif config.is_sft:
            none_fits, tail = True, ""
        yield Problem(
            key=key,
            wrong=f"{where}{more} the context of {limit}{tail}",
            suggestion="raise model.max_length, or lower rollout.sampling.max_tokens"
            if new
            else "raise model.max_length",
            is_note=not none_fits,
        )


def _answer_of(row: Mapping[str, Any]) -> str:
    """Which answer of a pair makes it long; empty for other rows."""
    if PAIR not in row:
        return ""
    chosen, rejected = row[PAIR]
    return f" with its {'chosen' if len(chosen) >= len(rejected) else 'rejected'} answer"


def _text(row: Mapping[str, Any], *, sft: bool) -> str | None:
    """The row's characters, to compare lengths; None if it has pictures or videos."""
    parts = [row["prompt"]] if isinstance(row["prompt"], str) else [each.get("content") for each in row["prompt"]]
    if sft and PAIR in row:
        parts.append(max(row[PAIR], key=len))
    elif sft:
        parts += [row["response"]] if "response" in row else [each.get("content") for each in row.get("messages", ())]
    return "".join(parts) if all(isinstance(part, str) for part in parts) else None


def _length(row: Mapping[str, Any], tokenizer: Tokenizer, template: str, config: RunConfig) -> int:
    """Tokens of a prompt, and in supervised training of its response, the longer one of a pair.

    Raises PromptError if the template rejects it.
    """
    prompt = row["prompt"]
    if config.is_sft and PAIR in row:
        plain = {name: value for name, value in row.items() if name not in (PAIR, "messages")}
        return max(_length({**plain, "response": each}, tokenizer, template, config) for each in row[PAIR])
    if isinstance(prompt, str):
        text = prompt + (row.get("response", "") if config.is_sft else "")
        return len(tokenizer.encode(text).ids)
    messages = [*prompt]
    if config.is_sft:
        messages = row.get("messages") or [*prompt, {"role": "assistant", "content": row.get("response", "")}]
    if not messages:
        raise PromptError("the chat begins with its only answer")
    try:
        text = _rendered(messages, template=template, tools=row.get("tools"), opens=not config.is_sft)
    except Exception as error:  # a template is a program of the model's, and meets rows of any form
        raise PromptError(str(error)) from error
    return len(tokenizer.encode(text, add_special_tokens=False).ids)


def _rendered(messages: Any, *, template: str, tools: Any = None, opens: bool = True) -> str:
    from transformers.utils.chat_template_utils import render_jinja_template

    rendered, _ = render_jinja_template(
        conversations=[messages], tools=tools, chat_template=template, add_generation_prompt=opens
    )
    return rendered[0]

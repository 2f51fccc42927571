"""Files of a run for reading: rollouts, and rows of the data that were not trained on.

rollouts/step_000012.jsonl      one line per rollout; the prompt, with the locations of its
                                pictures and videos, is in the first line of its group, and the roles
                                and texts of its messages if it is a chat of several. Some groups have
                                "terms": text, log-probability at sampling, and weights' version of each term,
                                its advantage where terms differ in it, and 0 in "mask" where it is not trained on.
                                An episode in turns has "exchanges": of each turn what the model said and called,
                                what the environment answered, rewards and seconds
rows_dropped.jsonl              one line per row, with its reason and the step that first needed it"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from cosmos_rl_core.types import Exchange, Rollout, RolloutGroup, ToolCall


def write_rollouts(
    directory: Path,
    *,
    step: int,
    groups: Iterable[RolloutGroup],
    name: str = "step",
    term_texts: Callable[[Rollout], Sequence[str]] = lambda rollout: (),
    term_groups: int = 0,
) -> Path:
    """Write the groups of one step to `directory`/step_NNNNNN.jsonl and return the path.

    `name` replaces "step" for groups that were not trained on, such as "eval". term_texts: the text of each term of a
    rollout, which is written for `term_groups` groups: the first, those of the lowest and the highest mean reward, the
    one whose rewards differ most, and the next.
    """
    groups = list(groups)
    chosen = frozenset(_shown(groups)[:term_groups])
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{name}_{step:06d}.jsonl"
    with path.open("w", encoding="utf-8", errors="replace") as file:  # calls may have halves of surrogate pairs
        for place, group in enumerate(groups):
            for number, rollout in enumerate(group.rollouts):
                line = _line(group, rollout, first=number == 0)
                if place in chosen and (texts := term_texts(rollout)):
                    line["terms"] = _terms(texts, rollout)
                file.write(json.dumps(line, ensure_ascii=False, allow_nan=False) + "\n")
    return path


class RolloutFiles:
    """Writes `rollouts/step_*.jsonl` in a background thread, while the step is computed."""

    def __init__(self, directory: Path, *, every: int, write: Callable[..., Path]) -> None:
        """every: steps from one file to the next; 0: none. write: `write_rollouts` with what it shows of the terms."""
        self._directory, self._every, self._write = directory, every, write
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="rollout files")
        self._writing: Future[Path] | None = None

    def has(self, step: int) -> bool:
        """Return whether the step gets a file."""
        return bool(self._every) and step % self._every == 0

    def begin(self, groups: Sequence[RolloutGroup], step: int) -> None:
        """Start writing the rollouts of a step, with final advantages. A step computed again replaces its file."""
        if self.has(step):
            self._writing = self._thread.submit(self._write, self._directory, step=step, groups=groups)

    async def written(self) -> None:
        """Wait until the last file is written. Raises OSError."""
        if self._writing is not None:
            await asyncio.wrap_future(self._writing)


def _shown(groups: Sequence[RolloutGroup]) -> list[int]:
    """Return the places of the groups, those first that say most about the step."""
    if not groups:
        return []
    rewards = [np.array([rollout.reward for rollout in group.rollouts], np.float64) for group in groups]
    means = [float(each.mean()) if each.size else math.nan for each in rewards]
    spreads = [float(each.std()) if each.size else math.nan for each in rewards]
    finite = [place for place in range(len(groups)) if math.isfinite(means[place])] or [0]
    worst, best = min(finite, key=means.__getitem__), max(finite, key=means.__getitem__)
    mixed = max(finite, key=spreads.__getitem__)
    return list(dict.fromkeys([0, worst, best, mixed, *range(len(groups))]))


def _line(group: RolloutGroup, rollout: Rollout, *, first: bool) -> dict[str, Any]:
    versions = rollout.versions
    return {
        "sample": group.prompt.sample_id,
        **({"prompt": group.prompt_text} if first else {}),
        **({"turns": turns} if first and len(turns := turns_of(group.prompt.row)) > 1 else {}),
        **({"prompt_media": dict(group.media)} if first and group.media else {}),
        "response": rollout.text,
        "reward": finite(rollout.reward),
        "rewards": {name: finite(value) for name, value in rollout.reward_breakdown.items()},
        "advantage": finite(rollout.advantage),
        "versions": [int(versions.min()), int(versions.max())] if rollout.num_terms else [],
        "finish_reason": rollout.finish_reason,
        "num_terms": rollout.num_terms,
        **exchange_lines(rollout),
    }


def exchange_lines(rollout: Rollout) -> dict[str, Any]:
    """Return the turns of an episode under their key; empty for an answer of one turn."""
    return {"exchanges": [_exchange(each) for each in rollout.exchanges]} if rollout.exchanges else {}


def _exchange(exchange: Exchange) -> dict[str, Any]:
    """A turn without what it has not."""
    optional = {
        "reasoning": exchange.reasoning,
        "calls": [_call(call) for call in exchange.calls],
        "problem": exchange.problem,
        "messages": [_message(message) for message in exchange.messages],
        "reward": None if exchange.reward is None else finite(exchange.reward),
        "metrics": {name: finite(value) for name, value in exchange.metrics.items()},
        "branch": exchange.branch,
    }
    return {
        "text": exchange.text,
        **{name: value for name, value in optional.items() if value or (name == "reward" and value is not None)},
        "model_s": round(exchange.model_s, 4),
        "environment_s": round(exchange.environment_s, 4),
    }


def _call(call: ToolCall) -> dict[str, str]:
    """The arguments are text, as models may write numbers that JSON does not have."""
    return {"name": call.name, "arguments": json.dumps(dict(call.arguments), ensure_ascii=False, default=str)}


def _message(message: Mapping[str, Any]) -> dict[str, str]:
    """Role and text of a message, and the tool that answers."""
    name = message.get("name")
    return {
        "role": str(message.get("role", "")),
        **({"name": str(name)} if name else {}),
        "content": _text(message.get("content")),
    }


def turns_of(row: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return role and text of each message of a row's prompt, pictures and videos as "[image]"; empty for no chat."""
    messages = row.get("prompt")
    if not isinstance(messages, list) or not all(isinstance(message, Mapping) for message in messages):
        return []
    return [(str(message.get("role", "")), _text(message.get("content"))) for message in messages]


def _text(content: Any) -> str:
    parts = content if isinstance(content, list) else [content]
    shown = (part.get("text", f"[{part.get('type')}]") if isinstance(part, Mapping) else part for part in parts)
    return " ".join(str(part) for part in shown if part is not None)


def _terms(texts: Sequence[str], rollout: Rollout) -> dict[str, Any]:
    terms = {
        "texts": list(texts),
        "logprobs": [finite(round(value, 4)) for value in rollout.rollout_logprobs.tolist()],
        "versions": rollout.versions.tolist(),
    }
    advantages = rollout.term_advantages
    if not np.array_equal(advantages, np.full_like(advantages, rollout.advantage), equal_nan=True):
        terms["advantages"] = [finite(round(value, 4)) for value in advantages.tolist()]
    if not rollout.loss_mask.all():
        terms["mask"] = rollout.loss_mask.astype(int).tolist()
    return terms


def finite(value: float) -> float | None:
    """Return a number as JSON has it: None for infinity and NaN."""
    return float(value) if math.isfinite(value) else None


DROPPED = "rows_dropped.jsonl"


def write_dropped(run_dir: Path, *, step: int, reasons: Sequence[str]) -> None:
    """Append the reasons of the rows that were dropped in a step."""
    run_dir.mkdir(parents=True, exist_ok=True)
    with (run_dir / DROPPED).open("a", encoding="utf-8") as file:
        file.writelines(json.dumps({"step": step, "reason": reason}, ensure_ascii=False) + "\n" for reason in reasons)


def first_reasons(run_dir: Path, *, first_step: int, count: int) -> list[str]:
    """Return the reasons of the first `count` rows that were dropped in `first_step` or later."""
    if not (run_dir / DROPPED).is_file():
        return []
    with (run_dir / DROPPED).open(encoding="utf-8") as file:
        lines = (json.loads(line) for line in file if line.endswith("\n"))
        reasons = (line["reason"] for line in lines if line["step"] >= first_step)
        return [reason for _, reason in zip(range(count), reasons, strict=False)]

"""The part of a response that is its answer, after the thought; and searches for marks in linear time.

Some templates open the thought, so that a response begins inside it: "7 * 6 is 42.</think> The answer is 42."
"""

from __future__ import annotations

import re

from cosmos_rl_core.types import Rollout, RolloutGroup

_CLOSING = {
    "<think>": "</think>",
    "<thinking>": "</thinking>",
    "<seed:think>": "</seed:think>",
    "[THINK]": "[/THINK]",
    "◁think▷": "◁/think▷",
}
_OPENS = re.compile("|".join(map(re.escape, _CLOSING)))
_CLOSES = re.compile("|".join(map(re.escape, _CLOSING.values())))


def opened_thought(group: RolloutGroup) -> str:
    """Return the mark that the prompt ends with and that opens the responses' thought; "" if there is none."""
    prompt = group.prompt_text.rstrip()
    return next((opening for opening in _CLOSING if prompt.endswith(opening)), "")


def answer_part(group: RolloutGroup, rollout: Rollout) -> str:
    """Return the response after its last thought; of a thought that was cut nothing counts.

    After a closed thought without an answer, the response as a whole.
    """
    text = rollout.text
    closes = [match.end() for match in _CLOSES.finditer(text)]
    rest = text[closes[-1] :] if closes else opened_thought(group) + text
    opens = _OPENS.search(rest)
    if opens is not None:
        return rest[: opens.start()]
    return rest if rest.strip() else text


def last_between(text: str, opening: str, closing: str) -> str | None:
    """Return the text between the last closed pair of marks, or None."""
    between, place = None, 0
    while (start := text.find(opening, place)) >= 0:
        start += len(opening)
        end = text.find(closing, start)
        if end < 0:
            break
        between, place = text[start:end], end + len(closing)
    return between

"""The reference answer of a group, for rewards that compare with one."""

from __future__ import annotations

from cosmos_rl_core.errors import UserError
from cosmos_rl_core.types import RolloutGroup


def reference_answer(group: RolloutGroup) -> str:
    """Return the row's answer.

    Raises:
        UserError: the row has none.
    """
    answer = group.prompt.row.get("answer")
    if not isinstance(answer, str) or not answer.strip():
        raise UserError("the row has no reference answer; name its column in data.answer_column")
    return answer

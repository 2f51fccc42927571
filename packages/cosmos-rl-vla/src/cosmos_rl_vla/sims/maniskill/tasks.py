"""Instructions of ManiSkill's table-top tasks whose robots, objects and goals are in its wheel."""

from __future__ import annotations

import difflib

from cosmos_rl_core.errors import UserError

INSTRUCTIONS = {
    "LiftPegUpright-v1": "stand the peg upright",
    "PegInsertionSide-v1": "insert the peg into the hole in the box",
    "PickCube-v1": "pick up the red cube and hold it at the green ball",
    "PlaceSphere-v1": "put the ball into the bin",
    "PokeCube-v1": "poke the cube with the peg",
    "PullCube-v1": "pull the cube into the target",
    "PullCubeTool-v1": "pull the cube closer with the tool",
    "PushCube-v1": "push the cube into the target",
    "RollBall-v1": "roll the ball into the target",
    "StackCube-v1": "put the red cube on the green cube",
    "StackPyramid-v1": "build a pyramid of the three cubes",
}
"""One sentence per task."""

BUILT_ANEW = frozenset({"PegInsertionSide-v1"})
"""Tasks that randomise sizes of objects, so that each episode needs a scene of its own."""


def instruction(task: str) -> str:
    """Return the instruction of a task. Raises UserError for an unknown one."""
    if task not in INSTRUCTIONS:
        near = difflib.get_close_matches(task, INSTRUCTIONS, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"tasks: {', '.join(INSTRUCTIONS)}"
        raise UserError(f"simulator maniskill has no task {task!r}; {hint}")
    return INSTRUCTIONS[task]

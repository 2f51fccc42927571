"""Instructions of MetaWorld's tasks."""

from __future__ import annotations

import difflib

from cosmos_rl_core.errors import UserError

INSTRUCTIONS = {
    "assembly": "pick up the ring and put it over the peg",
    "basketball": "put the ball through the hoop",
    "bin-picking": "move the block from one bin to the other",
    "box-close": "put the lid on the box",
    "button-press": "press the button on the front of the box",
    "button-press-topdown": "press the button from above",
    "button-press-topdown-wall": "reach over the wall and press the button from above",
    "button-press-wall": "go around the wall and press the button on the front",
    "coffee-button": "press the button of the coffee machine",
    "coffee-pull": "pull the mug away from the coffee machine",
    "coffee-push": "push the mug under the coffee machine",
    "dial-turn": "turn the dial",
    "disassemble": "take the ring off the peg",
    "door-close": "close the door",
    "door-lock": "lock the door",
    "door-open": "open the door",
    "door-unlock": "unlock the door",
    "drawer-close": "close the drawer",
    "drawer-open": "open the drawer",
    "faucet-close": "close the faucet",
    "faucet-open": "open the faucet",
    "hammer": "hammer the nail into the wall",
    "hand-insert": "put the gripper into the hole",
    "handle-press": "press the handle down",
    "handle-press-side": "press the handle down from the side",
    "handle-pull": "pull the handle up",
    "handle-pull-side": "pull the handle up from the side",
    "lever-pull": "pull the lever up",
    "peg-insert-side": "insert the peg into the hole from the side",
    "peg-unplug-side": "pull the peg out of the hole",
    "pick-out-of-hole": "take the puck out of the hole",
    "pick-place": "pick up the puck and carry it to the goal",
    "pick-place-wall": "carry the puck over the wall to the goal",
    "plate-slide": "slide the plate forward into the cabinet",
    "plate-slide-back": "slide the plate back out of the cabinet",
    "plate-slide-back-side": "slide the plate sideways out of the cabinet",
    "plate-slide-side": "slide the plate sideways into the cabinet",
    "push": "push the puck to the goal",
    "push-back": "pull the block back to the goal",
    "push-wall": "push the puck around the wall to the goal",
    "reach": "move the gripper to the goal",
    "reach-wall": "move the gripper around the wall to the goal",
    "shelf-place": "put the block on the shelf",
    "soccer": "push the ball into the goal",
    "stick-pull": "pull the box with the stick",
    "stick-push": "push the box with the stick",
    "sweep": "sweep the block off the table",
    "sweep-into": "sweep the block into the hole",
    "window-close": "close the window",
    "window-open": "open the window",
}
"""One sentence for each of the fifty tasks."""


def instruction(task: str) -> str:
    """Return the instruction of a task. Raises UserError for one that MetaWorld does not have."""
    if task not in INSTRUCTIONS:
        near = difflib.get_close_matches(task, INSTRUCTIONS, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"tasks: {', '.join(INSTRUCTIONS)}"
        raise UserError(f"MetaWorld has no task {task!r}; {hint}")
    return INSTRUCTIONS[task]

"""README.md of an export: the model card that the Hugging Face hub shows.

Names of models and data that are paths of a machine are cut to their last part.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any


def model_card(recipe: Mapping[str, Any], *, step: int, library: str | None) -> str:
    """Return the card of a model that was trained by a recipe.

    recipe: a checkpoint's as tables; one that was saved without a run has few of them. library: the one that loads the
    export, in the hub's spelling.
    """
    algorithm, base = recipe.get("algorithm", {}).get("name", "model"), recipe["model"].get("path")
    facts = dict(_facts(recipe, step=step))
    front = {
        "library_name": library,
        "base_model": base if isinstance(base, str) and _is_hub_id(base) else None,
        "tags": ["cosmos-rl", algorithm],
    }
    lines = [
        "---",
        # JSON is YAML: no other writer is needed
        *(f"{key}: {json.dumps(value)}" for key, value in front.items() if value is not None),
        "---",
        "",
        f"# {recipe['run'].get('name') or algorithm}",
        "",
        f"Trained by Cosmos-RL {version('cosmos-rl-core')} ({recipe['run']['domain']}, {algorithm}).",
        "",
        "| | |",
        "|---|---|",
        *(f"| {name} | {value} |" for name, value in facts.items()),
    ]
    return "\n".join(lines) + "\n"


def _facts(recipe: Mapping[str, Any], *, step: int) -> Iterator[tuple[str, str]]:
    policy, reward = recipe.get("policy", {}), recipe.get("reward", {})
    places = {"base model": recipe["model"].get("path"), "data": recipe.get("data", {}).get("path")}
    for name, place in places.items():
        if isinstance(place, str) and place:
            yield name, f"`{place if _is_hub_id(place) else Path(place).name}`"
    yield "steps", str(step)
    if "prompts_per_step" in policy:
        yield "prompts a step", str(policy["prompts_per_step"])
    functions = reward.get("functions") or ()
    if functions:
        yield "rollouts a prompt", str(recipe["rollout"]["group_size"])
        yield "rewards", ", ".join(f"{one.get('weight', 1.0):g} x {one['name']}" for one in functions)
    if "learning_rate" in policy.get("optimizer", {}):
        yield "learning rate", f"{policy['optimizer']['learning_rate']:g}"


def _is_hub_id(place: str) -> bool:
    """Whether a model or dataset is named as on a hub, OWNER/NAME; a path of two parts looks the same."""
    return place.count("/") == 1 and not place.startswith((".", "/", "~")) and not Path(place).exists()

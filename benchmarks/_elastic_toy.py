"""The toy model of elastic.py's kills, equal on both sides: the network of the tiny domain, 0.5 million parameters.

Imported in both environments, so it imports neither framework, and takes torch as an argument.
"""

from __future__ import annotations

from typing import Any

REPLICAS = 3
CONTEXTS, HIDDEN, ACTIONS = 2048, 256, 5
PLACES = 16
"""Rows of the tiny network's second embedding."""
LENGTH = 3
"""Terms of a row, as in the tiny domain's supervised rows."""
ROWS = 48
"""Rows of a step, over all replicas."""
LEARNING_RATE = 1e-3


def network(torch: Any) -> Any:
    """Return the network of `cosmos_rl_core.testing.tiny_model`."""

    class Network(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.context = torch.nn.Embedding(CONTEXTS, HIDDEN)
            self.place = torch.nn.Embedding(PLACES, HIDDEN)
            self.out = torch.nn.Linear(HIDDEN, ACTIONS)

        def forward(self, contexts: Any, places: Any) -> Any:
            return self.out(torch.tanh(self.context(contexts) * self.place(places)))

    torch.manual_seed(0)
    return Network()


def batch(torch: Any, *, rows: int) -> tuple[Any, Any, Any]:
    """Return contexts, places and actions, each [rows * LENGTH] int64."""
    contexts = torch.arange(rows).repeat_interleave(LENGTH)
    places = torch.arange(LENGTH).repeat(rows)
    return contexts, places, (contexts + places) % ACTIONS


def recipe() -> dict[str, Any]:
    """Return the tables of our side's recipe: supervised training of the same network on the same rows."""
    return {
        "run": {"domain": "cosmos_rl_core.testing.tiny:TINY", "name": "elastic", "max_steps": 10_000_000},
        "model": {"contexts": CONTEXTS, "hidden": HIDDEN, "actions": ACTIONS},
        "data": {"rows": CONTEXTS},
        "algorithm": {"name": "sft"},
        "policy": {
            "prompts_per_step": ROWS,
            "replicas": REPLICAS,
            "threads": 1,
            "optimizer": {"learning_rate": LEARNING_RATE},
        },
        "elastic": {"restart_workers": 1000},
        "logging": {"sinks": ["jsonl"]},
    }

"""Language models on Cosmos-RL: the GRPO family and supervised training. The domain is `LLM`.

Called by core through `Domain`; imports core and transfer. `__all__` lists the public names. Importing this imports no
torch and no transformers.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cosmos_rl_llm.data.chat import Chat
    from cosmos_rl_llm.domain import LLM, LLMDomain
    from cosmos_rl_llm.tiny import write_sums, write_tiny_model

_HOMES = {
    "domain": ("LLM", "LLMDomain"),
    "data.chat": ("Chat",),
    "tiny": ("write_sums", "write_tiny_model"),
}
"""Public names by the module that defines them."""
_HOME = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "Chat",
    "LLM",
    "LLMDomain",
    "write_sums",
    "write_tiny_model",
]


if not TYPE_CHECKING:  # a type checker uses the imports above, and so reports a misspelt name

    def __getattr__(name: str) -> Any:
        """Import a public name at its first use."""
        if name not in _HOME:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]

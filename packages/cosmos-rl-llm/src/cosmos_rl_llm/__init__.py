"""Language models on Cosmos-RL: the GRPO family and supervised training. The domain is `LLM`.

Called by core through `Domain`; imports core and transfer. `__all__` lists the public names. Importing this imports no
torch and no transformers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cosmos_rl_core.imports import lazy_exports

if TYPE_CHECKING:
    from cosmos_rl_llm.data.chat import Chat
    from cosmos_rl_llm.domain import LLM, LLMDomain
    from cosmos_rl_llm.sandbox.sandbox import Sandbox, SandboxOptions, run_python
    from cosmos_rl_llm.tiny import write_sums, write_tiny_model
    from cosmos_rl_llm.tools.environment import ToolEnvironment
    from cosmos_rl_llm.tools.tool import ToolUnavailable

_HOMES = {
    "domain": ("LLM", "LLMDomain"),
    "data.chat": ("Chat",),
    "sandbox.sandbox": ("Sandbox", "SandboxOptions", "run_python"),
    "tiny": ("write_sums", "write_tiny_model"),
    "tools.environment": ("ToolEnvironment",),
    "tools.tool": ("ToolUnavailable",),
}
"""Public names by the module that defines them."""

__all__ = [
    "Chat",
    "LLM",
    "LLMDomain",
    "Sandbox",
    "SandboxOptions",
    "ToolEnvironment",
    "ToolUnavailable",
    "run_python",
    "write_sums",
    "write_tiny_model",
]

if not TYPE_CHECKING:  # a type checker uses the imports above, and so reports a misspelt name
    __getattr__, __dir__ = lazy_exports(__name__, _HOMES)

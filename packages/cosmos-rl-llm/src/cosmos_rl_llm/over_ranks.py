"""The policy of a model over its ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from transformers import PreTrainedModel

from cosmos_rl_core.parallel.setup import ModelSetup
from cosmos_rl_llm.data.chat import Chat
from cosmos_rl_llm.policy.policy import CausalLMPolicy
from cosmos_rl_llm.policy.token_model import PLAIN, TermOptions

if TYPE_CHECKING:
    from cosmos_rl_llm.policy.pipelined import PipelinedPolicy


def policy_over(
    model: PreTrainedModel, options: TermOptions = PLAIN, *, chat: Chat | None = None, setup: ModelSetup
) -> CausalLMPolicy | PipelinedPolicy:
    """Make the policy of a model over the ranks of `setup`; with pp above 1 of this rank's stages."""
    if setup.parallel.pp == 1:
        return CausalLMPolicy(model, options, chat=chat, setup=setup)
    from cosmos_rl_llm.policy.pipelined import PipelinedPolicy  # with torch's schedules, which others do not need

    return PipelinedPolicy(model, options, chat=chat, setup=setup)

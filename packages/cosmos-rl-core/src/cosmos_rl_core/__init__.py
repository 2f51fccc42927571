"""Controller, trainer, algorithms and interfaces of Cosmos-RL: asynchronous reinforcement learning for Physical AI.

The names in `__all__` are public: users write against them, examples and docs import nothing else. All other modules
may move. Importing this imports neither torch nor numpy: a name's module is imported when the name is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cosmos_rl_core.imports import lazy_exports

if TYPE_CHECKING:
    from cosmos_rl_core.algorithms.config import AlgorithmConfig
    from cosmos_rl_core.algorithms.table import Algorithm
    from cosmos_rl_core.domain_base import DomainBase
    from cosmos_rl_core.episodes.interfaces import Environment, Observation
    from cosmos_rl_core.errors import PromptError, SampleError, UserError, WorkerFailed
    from cosmos_rl_core.inference.evaluate import Evaluated, evaluate
    from cosmos_rl_core.inference.generate import Generated, generate
    from cosmos_rl_core.inference.request import Instances, Request
    from cosmos_rl_core.interfaces import Check, Domain, Objective, Policy, Recorder, RewardFn, RolloutEngine
    from cosmos_rl_core.launch.observer import RunResult
    from cosmos_rl_core.launch.run import run
    from cosmos_rl_core.parallel.gradients import accumulate
    from cosmos_rl_core.parallel.setup import ModelSetup
    from cosmos_rl_core.recipe.load import load_config
    from cosmos_rl_core.recipe.run import RunConfig
    from cosmos_rl_core.recipe.sections import SamplingSection
    from cosmos_rl_core.rollout.engine_thread import EngineRequest, ThreadedEngine
    from cosmos_rl_core.settings.base import Options
    from cosmos_rl_core.settings.problems import engine_options
    from cosmos_rl_core.testing.conformance import ENGINE_CHECKS, check_reward
    from cosmos_rl_core.testing.environments import ENVIRONMENT_CHECKS, check_environment
    from cosmos_rl_core.train.policy_base import PolicyBase
    from cosmos_rl_core.types import (
        Episode,
        Exchange,
        LossTerm,
        Microbatch,
        PolicyOutputs,
        Prompt,
        Rollout,
        RolloutGroup,
        Sampling,
        Share,
        TermBatch,
        ToolCall,
        TrainBatch,
        Turn,
        WeightSpec,
    )
    from cosmos_rl_core.weight_sync import WeightSync

_HOMES = {
    "launch.run": ("run",),
    "launch.observer": ("RunResult",),
    "inference.generate": ("Generated", "generate"),
    "inference.evaluate": ("Evaluated", "evaluate"),
    "inference.request": ("Instances", "Request"),
    "recipe.load": ("load_config",),
    "recipe.run": ("RunConfig",),
    "recipe.sections": ("SamplingSection",),
    "settings.base": ("Options",),
    "settings.problems": ("engine_options",),
    "errors": ("PromptError", "SampleError", "UserError", "WorkerFailed"),
    "types": (
        *("Episode", "Exchange", "LossTerm", "Microbatch", "PolicyOutputs", "Prompt", "Rollout", "RolloutGroup"),
        *("Sampling", "Share", "TermBatch", "ToolCall", "TrainBatch", "Turn", "WeightSpec"),
    ),
    "episodes.interfaces": ("Environment", "Observation"),
    "interfaces": ("Check", "Domain", "Objective", "Policy", "Recorder", "RewardFn", "RolloutEngine"),
    "weight_sync": ("WeightSync",),
    "domain_base": ("DomainBase",),
    "train.policy_base": ("PolicyBase",),
    "rollout.engine_thread": ("EngineRequest", "ThreadedEngine"),
    "algorithms.table": ("Algorithm",),
    "algorithms.config": ("AlgorithmConfig",),
    "parallel.setup": ("ModelSetup",),
    "parallel.gradients": ("accumulate",),
    "testing.conformance": ("ENGINE_CHECKS", "check_reward"),
    "testing.environments": ("ENVIRONMENT_CHECKS", "check_environment"),
}
"""Public names by the module that defines them."""

__all__ = [
    "Algorithm",
    "AlgorithmConfig",
    "Check",
    "Domain",
    "DomainBase",
    "ENGINE_CHECKS",
    "ENVIRONMENT_CHECKS",
    "EngineRequest",
    "Environment",
    "Episode",
    "Evaluated",
    "Exchange",
    "Generated",
    "Instances",
    "LossTerm",
    "Microbatch",
    "ModelSetup",
    "Objective",
    "Observation",
    "Options",
    "Policy",
    "PolicyBase",
    "PolicyOutputs",
    "Prompt",
    "PromptError",
    "Recorder",
    "Request",
    "RewardFn",
    "Rollout",
    "RolloutEngine",
    "RolloutGroup",
    "RunConfig",
    "RunResult",
    "SampleError",
    "Sampling",
    "SamplingSection",
    "Share",
    "TermBatch",
    "ThreadedEngine",
    "ToolCall",
    "TrainBatch",
    "Turn",
    "UserError",
    "WeightSpec",
    "WeightSync",
    "WorkerFailed",
    "accumulate",
    "check_environment",
    "check_reward",
    "engine_options",
    "evaluate",
    "generate",
    "load_config",
    "run",
]

if not TYPE_CHECKING:  # a type checker uses the imports above, and so reports a misspelt name
    __getattr__, __dir__ = lazy_exports(__name__, _HOMES)

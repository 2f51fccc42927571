"""Whether adapters are in effect in the engine, by rollouts of one version that are older than the policy."""

import numpy as np
import pytest
import torch
from torch import nn

from cosmos_rl_core.errors import UserError
from cosmos_rl_core.interfaces import Policy
from cosmos_rl_core.parallel.config import LoraSection
from cosmos_rl_core.parallel.lora import add_adapters, without_adapters
from cosmos_rl_core.train.comparison import EngineComparison
from cosmos_rl_core.types import Microbatch, PolicyOutputs, Prompt, Rollout, RolloutGroup, TermBatch, TrainBatch
from cosmos_rl_core.weight_sync import SyncSection

pytest.importorskip("peft", reason="creates the adapters")

INPUTS = torch.eye(4)


class Rows(Policy):
    """A policy whose i-th term has the log-probability of the first of two outputs for the i-th row of INPUTS."""

    def __init__(self):
        torch.manual_seed(0)
        self._module = nn.ModuleDict({"layer": nn.Linear(4, 2, bias=False)})
        section = LoraSection(rank=2, alpha=2.0)
        add_adapters(self._module, section, layers=["layer"], package="cosmos-rl-llm")

    @property
    def module(self):
        return self._module

    def logprobs(self):
        return torch.log_softmax(self._module["layer"](INPUTS), -1)[:, 0]

    def forward(self, microbatch, *, with_entropy=False):
        assert not torch.is_grad_enabled()
        return PolicyOutputs(logprobs=self.logprobs())

    def train_to(self, version):
        """Give every version other adapters; those of 1 and 2 have opposite effects."""
        with torch.no_grad():
            self._module["layer"].lora_B["default"].weight.copy_(
                torch.tensor([[1.0, -1.0], [-1.0, 1.0]]) * (-1) ** version * (version > 0)
            )


def collate(groups):
    microbatches = [
        Microbatch(
            inputs={},
            terms=TermBatch(
                rollout_logprobs=torch.from_numpy(rollout.rollout_logprobs),
                advantages=torch.zeros(4),
                loss_mask=torch.ones(4),
                rollout_index=torch.zeros(4, dtype=torch.int64),
                num_rollouts=1,
            ),
        )
        for group in groups
        for rollout in group.rollouts
    ]
    return TrainBatch(microbatches=tuple(microbatches), num_terms=4 * len(microbatches), num_rollouts=len(microbatches))


class Sampled:
    """Versions of a policy, what an engine with and without its adapters answers under each, and the check."""

    def __init__(self, *, max_staleness, interval=1, applies=True):
        self.policy, self.lines, self.answers = Rows(), [], {}
        self._applies = applies
        self.check = EngineComparison(
            self.policy,
            collate=collate,
            mesh=None,
            tolerance=1e-4,
            sync=SyncSection(max_staleness=max_staleness, interval=interval),
            log=self.lines.append,
            warn=self.lines.append,
        ).check_adapters

    def step(self, step, *versions):
        """Let the check see one group of rollouts for each tuple of versions, at `step`; return the parameters after
        it, and as they were."""
        self.policy.train_to(step)
        with torch.no_grad():
            if self._applies:
                self.answers[step] = self.policy.logprobs().numpy()
            else:
                with without_adapters(self.policy.module):
                    self.answers[step] = self.policy.logprobs().numpy()
        before = [parameter.detach().clone() for parameter in self.policy.module.parameters()]
        self.check([self._group(each) for each in versions], step=step)
        return list(self.policy.module.parameters()), before

    def _group(self, versions):
        rollouts = [
            Rollout(
                arrays={},
                rollout_logprobs=self.answers[version],
                versions=np.full(4, version, np.int32),
                loss_mask=np.ones(4, bool),
            )
            for version in versions
        ]
        return RolloutGroup(prompt=Prompt(sample_id=0, row={}), rollouts=tuple(rollouts))


def test_old_rollouts_are_compared_with_the_policy_of_their_version():
    sampled = Sampled(max_staleness=2)
    sampled.step(0)
    sampled.step(1, (0, 0))
    after, before = sampled.step(2, (1, 1))  # the policy's present adapters have the opposite effect
    assert sampled.lines == ["step 2: the adapters are in effect in the engine"]
    assert all(map(torch.equal, after, before))


def test_an_engine_without_them_is_named_by_old_rollouts():
    sampled = Sampled(max_staleness=2, applies=False)
    sampled.step(1)
    sampled.step(2)
    with pytest.raises(UserError, match=r"step 3: the adapters are not in effect .* of version 1 differ by 0 nats"):
        sampled.step(3, (1, 1))


@pytest.mark.parametrize("versions", [(0, 0), (1, 2), (2, 2)])
def test_rollouts_of_the_base_of_several_versions_and_of_a_version_that_is_not_kept_show_nothing(versions):
    sampled = Sampled(max_staleness=2, applies=False)
    for step in (0, 1, 2):
        sampled.step(step)
    sampled.step(3, versions)
    assert sampled.lines == []


def test_the_next_version_is_kept_once_rollouts_of_the_last_can_come_no_longer():
    sampled = Sampled(max_staleness=1)
    sampled.step(1)
    sampled.step(2)
    sampled.step(3, (2, 2))  # 1 was kept
    sampled.step(4, (3, 3))
    assert sampled.lines == ["step 4: the adapters are in effect in the engine"]


def test_only_versions_that_engines_load_are_kept():
    sampled = Sampled(max_staleness=2, interval=2)
    sampled.step(1)
    sampled.step(2)
    sampled.step(3, (2, 2))
    assert sampled.lines == ["step 3: the adapters are in effect in the engine"]

"""On a pretend GPU a step's memory does not grow with its microbatches: outputs of other weights are on the host."""

import gc

import pytest
import torch
from wfm_fixtures import mock_data, pixel_model

from cosmos_rl_core.parallel.setup import ModelSetup
from cosmos_rl_core.train.learner import FrozenModels
from cosmos_rl_core.types import Microbatch, TermBatch
from cosmos_rl_wfm.build import build_policy
from cosmos_rl_wfm.sampling import FlowSampling
from doubles.pretend_cuda import pretend_cuda
from doubles.pretend_tensor import PretendTensor

STEPS = FlowSampling(num_steps=4)
CLEAN = FlowSampling(num_steps=4, rule="ode", old_decay="slow")
SHAPE = (2, 3, 4, 8, 8)
ROWS = 2 * 4  # bytes of a float32 of each term


def microbatch(sampling, seed):
    generator = torch.Generator().manual_seed(seed)
    names = ("states", "next_states") if sampling is STEPS else ("clean", "noise")
    return Microbatch(
        inputs={
            **{name: torch.randn(SHAPE, generator=generator) for name in names},
            "times": torch.tensor([0.8, 0.5]),
            "next_times": torch.tensor([0.5, 0.25]),
            "text": torch.randn(2, 4, 16, generator=generator),
            "text_mask": torch.ones(2, 4, dtype=torch.bool),
        },
        terms=TermBatch(
            rollout_logprobs=torch.zeros(2),
            advantages=torch.zeros(2),
            loss_mask=torch.ones(2),
            rollout_index=torch.arange(2),
            num_rollouts=2,
        ),
    )


def policy_of(sampling):
    return build_policy(pixel_model(), data=mock_data(), sampling=sampling, seed=0, setup=ModelSetup())


def completed(policy, reference, sampling, count):
    """The microbatches of a step as its forward and backward passes get them."""
    frozen = FrozenModels(reference=reference)
    return policy._with_old(frozen.complete([microbatch(sampling, i) for i in range(count)]))


def bytes_on_gpu():
    gc.collect()
    held = [each.held.untyped_storage() for each in gc.get_objects() if type(each) is PretendTensor]
    return sum({storage.data_ptr(): storage.nbytes() for storage in held}.values())


@pytest.mark.cuda_dry
@pytest.mark.parametrize("sampling", [STEPS, CLEAN], ids=["FlowGRPO", "NFT"])
def test_only_log_probabilities_of_each_microbatch_are_on_the_gpu(sampling):
    policy, reference = policy_of(sampling), policy_of(sampling)
    kept = {}
    with pretend_cuda() as record:
        policy.module.to("cuda"), reference.module.to("cuda")
        for count in (2, 8):
            record.clear()
            held = completed(policy, reference, sampling, count)
            kept[count] = bytes_on_gpu()
            assert len(held) == count
            assert not record.synchronisations, record
            assert not record.uploads, record
            del held
    assert kept[8] - kept[2] <= 6 * ROWS


@pytest.mark.parametrize("sampling", [STEPS, CLEAN], ids=["FlowGRPO", "NFT"])
def test_on_a_cpu_they_are_the_tensors_that_were_computed(sampling):
    policy, reference = policy_of(sampling), policy_of(sampling)
    [held, _] = completed(policy, reference, sampling, 2)
    name = "whitened" if sampling is STEPS else "velocity"
    with torch.no_grad():
        wanted = reference.forward(microbatch(sampling, 0)).tensors[name]
    assert torch.equal(held.terms.ref_tensors[name], wanted)
    if sampling is CLEAN:
        assert torch.equal(held.inputs["old_velocity"], wanted)  # the old weights are those of the start

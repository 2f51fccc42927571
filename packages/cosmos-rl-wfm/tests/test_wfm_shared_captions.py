"""Samples of a prompt share one copy of its caption, from rollout to microbatch to the network's own projection."""

import numpy as np
import pytest
import torch
from wfm_fixtures import mock_data, pixel_model

from cosmos_rl_core.parallel.setup import ModelSetup
from cosmos_rl_core.types import Prompt, Rollout, RolloutGroup, Share
from cosmos_rl_wfm.build import build_policy
from cosmos_rl_wfm.collate import collate
from cosmos_rl_wfm.conditions import joined
from cosmos_rl_wfm.models.base import Condition
from cosmos_rl_wfm.models.build import build_model
from cosmos_rl_wfm.models.config import WFMModelConfig
from cosmos_rl_wfm.sampling import FlowSampling

LENGTH, WIDTH, STEPS = 64, 4096, 3


def condition(count, *, width=16, seed=0):
    generator = torch.Generator().manual_seed(seed)
    text = torch.randn(count, 4, width, generator=generator)
    return Condition(text=text, text_mask=torch.arange(4)[None] < torch.arange(1, count + 1)[:, None])


def group(number, size=8):
    path = np.zeros((STEPS + 1, 1, 2, 2, 2), np.float32)
    steps = {
        "path": path,
        "path_from": np.arange(STEPS, dtype=np.int32),
        "path_to": np.arange(1, STEPS + 1, dtype=np.int32),
        "times": np.ones(STEPS, np.float32),
        "next_times": np.zeros(STEPS, np.float32),
    }
    caption = {"text": np.full((LENGTH, WIDTH), number, np.float32), "text_mask": np.ones(LENGTH, bool)}
    for array in caption.values():
        array.flags.writeable = False  # as off the wire
    rollouts = tuple(
        Rollout(
            arrays=steps | (caption if place == 0 else {}),
            rollout_logprobs=np.zeros(STEPS, np.float32),
            versions=np.zeros(STEPS, np.int32),
            loss_mask=np.ones(STEPS, bool),
        )
        for place in range(size)
    )
    prompt = Prompt(sample_id=number, row={"caption": str(number)}, origin=f"test:{number}")
    return RolloutGroup(prompt=prompt, rollouts=rollouts)


def held_bytes(microbatches):
    """Of all tensors that go into the network, memory that several share counted once."""
    tensors = [tensor for microbatch in microbatches for tensor in microbatch.inputs.values()]
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


def test_a_batch_of_one_group_holds_one_copy_of_its_caption():
    batch = collate([group(0)], microbatch_terms=6, share=Share())
    assert len(batch.microbatches) == 4
    assert LENGTH * WIDTH * 4 < held_bytes(batch.microbatches) < 1.02 * LENGTH * WIDTH * 4


def test_every_term_has_its_own_groups_caption():
    batch = collate([group(1), group(2)], microbatch_terms=16, share=Share())
    captions = torch.cat([m.inputs["text"][m.inputs["text_rows"], 0, 0] for m in batch.microbatches])
    assert captions.tolist() == [1.0] * 24 + [2.0] * 24
    assert [len(m.inputs["text"]) for m in batch.microbatches] == [1, 2, 1]


def test_conditions_of_prompts_are_joined_with_each_caption_once():
    one, two = condition(1, seed=1), condition(1, seed=2)
    whole = joined([one, two], [3, 2])
    assert len(whole.text) == 2
    expected = torch.cat([one.text.expand(3, -1, -1), two.text.expand(2, -1, -1)])
    assert torch.equal(whole.gathered().text, expected)
    assert torch.equal(whole.select(torch.tensor([4, 0])).gathered().text, expected[[4, 0]])


@pytest.mark.parametrize("family", ["wan", "cosmos", "sd3"])
def test_a_shared_caption_gives_the_velocity_and_the_gradient_of_copies(family):
    config = WFMModelConfig.model_validate({"family": family, "tiny": True, "text": {"encoder": "words"}})
    model = build_model(config, parts=("network", "text"))
    model.network.requires_grad_(True)
    captions = joined([model.encode_text([text]) for text in ("a disc", "a square moving")], [2, 3])
    generator = torch.Generator().manual_seed(0)
    frames = 1 if model.family.only_images else 2
    latents = torch.randn(5, model.family.channels, frames, 4, 4, generator=generator)
    times = torch.linspace(0.2, 0.9, 5)
    found = []
    for held in (captions, captions.gathered()):
        model.network.zero_grad()
        velocity = model.velocity(latents, times, held)
        velocity.square().sum().backward()
        gradients = [weight.grad for weight in model.network.parameters() if weight.grad is not None]
        found.append((velocity.detach(), torch.cat([gradient.flatten() for gradient in gradients])))
    (velocity, gradient), (same, other) = found
    torch.testing.assert_close(velocity, same, rtol=1e-5, atol=1e-5)
    assert (gradient - other).norm() < 1e-5 * other.norm()


def test_the_networks_projection_sees_each_caption_once():
    config = WFMModelConfig.model_validate({"family": "wan", "tiny": True, "text": {"encoder": "words"}})
    model = build_model(config, parts=("network", "text"))
    seen = []
    projection = model.network.condition_embedder.text_embedder
    projection.register_forward_hook(lambda module, inputs, output: seen.append(len(inputs[0])))
    captions = joined([model.encode_text(["a disc"])], [3])
    model.velocity(torch.zeros(3, model.family.channels, 1, 4, 4), torch.full((3,), 0.5), captions)
    assert seen == [1]


def test_a_guided_policy_keeps_no_text_encoder():
    sampling = FlowSampling(num_steps=3, window="fixed", steps=(0,), guidance=3.0)
    policy = build_policy(pixel_model(), data=mock_data(), sampling=sampling, seed=0, setup=ModelSetup())
    assert policy._unconditional is not None
    assert policy._model.captions is None

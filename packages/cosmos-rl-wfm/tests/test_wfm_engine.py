"""Engine, collate and policy together: what was sampled is what is trained."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest
import torch
from wfm_fixtures import mock_data, pixel_model, prompt

from cosmos_rl_core.errors import PromptError, UserError
from cosmos_rl_core.parallel.setup import ModelSetup
from cosmos_rl_core.types import Prompt, RolloutGroup, Share
from cosmos_rl_wfm.build import build_engine, build_policy
from cosmos_rl_wfm.collate import collate
from cosmos_rl_wfm.engines.torch import WFMTorchOptions
from cosmos_rl_wfm.models.codec import to_video
from cosmos_rl_wfm.sampling import FlowSampling
from doubles.paused_forward import PausedForward, posted

STEPS = FlowSampling(num_steps=5, window="fixed", steps=(0, 2))
CLEAN = FlowSampling(num_steps=3, rule="ode", times_per_rollout=3)


def engine_of(model=None, data=None, samples_at_once=8):
    options = WFMTorchOptions(samples_at_once=samples_at_once)
    return build_engine(model or pixel_model(), data=data or mock_data(), options=options)


def policy_of(model=None, *, sampling=STEPS, data=None):
    return build_policy(model or pixel_model(), data=data or mock_data(), sampling=sampling, seed=0, setup=ModelSetup())


async def copy_weights(engine, weights, *, version=0):
    def apply():
        with torch.no_grad():
            for name, tensor in engine.weights().items():
                tensor.copy_(weights[name])

    await engine.switch(version, apply)


def sample_group(engine, *, num_samples=4, sampling=STEPS, seed=3, weights=None, given=None):
    async def main():
        if weights is not None:
            await copy_weights(engine, weights)
        sampled = await engine.generate(given or prompt(), num_samples=num_samples, sampling=sampling, seed=seed)
        await engine.close()
        return sampled

    return asyncio.run(main())


def group(rollouts, advantages):
    scored = tuple(replace(r, advantage=a) for r, a in zip(rollouts, advantages, strict=True))
    return RolloutGroup(prompt=prompt(), rollouts=scored)


@pytest.mark.parametrize("rule", ["flow_sde", "dance_sde", "cps"])
def test_before_the_first_update_every_ratio_is_exactly_one(rule):
    sampling = STEPS.model_copy(update={"rule": rule, "noise_level": 0.5})
    policy = policy_of(sampling=sampling)
    _, rollouts = sample_group(engine_of(), sampling=sampling, num_samples=4, weights=policy.weights())
    batch = collate([group(rollouts, [1.0, -1.0, 0.5, -0.5])], microbatch_terms=4, share=Share())
    assert (batch.num_terms, batch.num_rollouts, len(batch.microbatches)) == (8, 4, 2)
    for microbatch in batch.microbatches:
        outputs = policy.forward(microbatch)
        assert torch.equal(outputs.logprobs, microbatch.terms.rollout_logprobs)
        assert outputs.logprobs.requires_grad


def test_a_sample_follows_from_its_seed_and_not_from_its_batch():
    _, whole = sample_group(engine_of(), num_samples=3)
    _, cut = sample_group(engine_of(samples_at_once=2), num_samples=3)
    for one, other in zip(whole, cut, strict=True):
        np.testing.assert_allclose(one.arrays["path"], other.arrays["path"], atol=1e-5)
    _, again = sample_group(engine_of(), num_samples=3, seed=4)
    assert np.abs(whole[0].arrays["path"] - again[0].arrays["path"]).max() > 0.1


def test_rollouts_of_a_group_differ_and_share_their_start_where_asked():
    _, apart = sample_group(engine_of(), num_samples=2)
    _, shared = sample_group(engine_of(), num_samples=2, sampling=STEPS.model_copy(update={"same_noise": True}))
    starts = [[rollout.arrays["path"][0] for rollout in rollouts] for rollouts in (apart, shared)]
    assert not np.allclose(*starts[0])
    assert np.array_equal(*starts[1])
    assert not np.allclose(shared[0].arrays["path"][-1], shared[1].arrays["path"][-1])


def test_what_rewards_look_at_is_a_video_and_does_not_travel():
    text, rollouts = sample_group(engine_of(), num_samples=2, sampling=CLEAN)
    assert text == "a square moving left"
    for rollout in rollouts:
        clean = torch.from_numpy(rollout.arrays["clean"])[None]  # pixels: the latents of this model
        assert np.array_equal(rollout.media["video"], to_video(clean)[0].numpy())
        assert "video" not in rollout.arrays


def test_the_caption_travels_once_a_group():
    _, rollouts = sample_group(engine_of(), num_samples=3)
    assert {"text", "text_mask"} <= rollouts[0].arrays.keys()
    assert "text" not in rollouts[1].arrays


def test_clean_samples_are_noised_at_their_own_times():
    policy = policy_of(sampling=CLEAN)
    _, rollouts = sample_group(engine_of(), sampling=CLEAN, num_samples=2, weights=policy.weights())
    (microbatch,) = collate([group(rollouts, [1.0, -1.0])], microbatch_terms=8, share=Share()).microbatches
    assert microbatch.inputs["clean"].shape[0] == 6
    assert len(microbatch.inputs["times"].unique()) == 6
    assert not torch.equal(microbatch.inputs["noise"][0], microbatch.inputs["noise"][1])
    tensors = policy.forward(microbatch).tensors
    wanted = (1 - tensors["times"]).view(-1, 1, 1, 1, 1) * tensors["clean"]
    noise = microbatch.inputs["noise"] * tensors["times"].view(-1, 1, 1, 1, 1)
    assert torch.allclose(tensors["states"], wanted + noise)


def test_new_weights_come_between_two_steps_and_terms_say_so():
    async def main():
        engine = engine_of()
        weights = {name: tensor.clone() for name, tensor in engine.weights().items()}
        await copy_weights(engine, weights, version=1)
        paused = PausedForward(engine._model.network)
        sampling = FlowSampling(num_steps=10, window="all")
        drawing = asyncio.create_task(engine.generate(prompt(), num_samples=1, sampling=sampling, seed=0))
        await paused.reached()
        switch = await posted(copy_weights(engine, weights, version=2))
        paused.go()
        await switch
        _, (rollout,) = await drawing
        await engine.close()
        return rollout.versions

    versions = asyncio.run(main())
    assert set(versions) == {1, 2}
    assert sorted(versions) == list(versions)


def test_a_cancelled_request_stops_at_the_next_step():
    async def main():
        engine = engine_of()
        paused = PausedForward(engine._model.network)
        sampling = FlowSampling(num_steps=100, window="fixed", steps=(0,))
        drawing = asyncio.create_task(engine.generate(prompt(), num_samples=1, sampling=sampling, seed=0))
        await paused.reached()
        drawing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await drawing
        paused.go()
        _, rollouts = await engine.generate(prompt(), num_samples=1, sampling=STEPS, seed=0)
        assert engine.progress <= 3 + STEPS.num_steps
        await engine.close()
        return rollouts

    assert len(asyncio.run(main())) == 1


def test_a_row_without_a_caption_is_an_error_of_the_prompt():
    with pytest.raises(PromptError, match="no caption"):
        sample_group(engine_of(), given=Prompt(sample_id=0, row={"text": "x"}, origin="rows:1"))


def test_a_size_that_the_model_cannot_take_is_told():
    with pytest.raises(UserError, match=r"4 frames of 9 x 8 does not fit .* nearest size is 4 frames of 8 x 8"):
        engine_of(data=mock_data(size={"frames": 4, "height": 9, "width": 8}))


@pytest.mark.parametrize(("guidance", "passes"), [(None, 5), (4.0, 10)])
def test_guidance_makes_a_second_pass_and_none_without(guidance, passes):
    calls, engine = [], engine_of()
    engine._model.network.register_forward_hook(lambda *_: calls.append(1))
    sample_group(engine, num_samples=1, sampling=STEPS.model_copy(update={"guidance": guidance}))
    assert len(calls) == passes


@pytest.mark.parametrize("negative", [None, "grey"])
def test_guided_rollouts_are_trained_with_their_guidance(negative):
    sampling = STEPS.model_copy(update={"guidance": 3.0})
    model = pixel_model(text={"encoder": "words", "length": 4, "negative_prompt": negative})
    policy = policy_of(model, sampling=sampling)
    _, rollouts = sample_group(engine_of(model), sampling=sampling, weights=policy.weights())
    (microbatch,) = collate([group(rollouts, [0.0] * 4)], microbatch_terms=8, share=Share()).microbatches
    sampled = microbatch.terms.rollout_logprobs
    assert torch.allclose(policy.forward(microbatch).logprobs, sampled, rtol=0, atol=1e-5)
    others = [policy_of(), *([policy_of(sampling=sampling)] if negative else [])]  # unguided; away from ""
    for other in others:
        assert not torch.allclose(other.forward(microbatch).logprobs, sampled, rtol=0, atol=5e-5)


def test_a_share_without_terms_of_its_own_gets_a_pass_that_trains_nothing():
    _, rollouts = sample_group(engine_of(), num_samples=1)
    groups = [group(rollouts, [1.0])]
    shares = [collate(groups, microbatch_terms=1, share=Share(index=i, count=4)) for i in range(4)]
    assert len({len(batch.microbatches) for batch in shares}) == 1
    assert sum(float(m.terms.loss_mask.sum()) for batch in shares for m in batch.microbatches) == 2


def test_samples_of_several_prompts_go_through_one_pass_and_stay_their_own():
    async def main(samples_at_once):
        engine = engine_of(samples_at_once=samples_at_once)
        asked = [
            engine.generate(prompt(i, caption), num_samples=2, sampling=STEPS, seed=i)
            for i, caption in enumerate(("a disc moving up", "a cross moving down"))
        ]
        sampled = await asyncio.gather(*asked)
        passes = engine.progress
        await engine.close()
        return passes, [rollout.arrays["path"] for _, rollouts in sampled for rollout in rollouts]

    (together, paths), (apart, same) = asyncio.run(main(4)), asyncio.run(main(2))
    assert (together, apart) == (5, 10)
    for one, other in zip(paths, same, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)


def test_a_row_without_a_caption_fails_alone():
    async def main():
        engine = engine_of()
        asked = [Prompt(sample_id=0, row={}, origin="rows:1"), prompt(1)]
        sampled = [engine.generate(each, num_samples=1, sampling=STEPS, seed=0) for each in asked]
        found = await asyncio.gather(*sampled, return_exceptions=True)
        await engine.close()
        return found

    bad, good = asyncio.run(main())
    assert isinstance(bad, PromptError)
    assert [rollout.media["video"].shape for rollout in good[1]] == [(4, 8, 8, 3)]


def test_a_policy_is_in_eval_mode():
    """Dropout would make training see another model than the one that generated."""
    assert not any(module.training for module in policy_of().module.modules())

"""The engine over real simulators in processes of their own, and the policy that trains on what it gives."""

from __future__ import annotations

import asyncio
import os
import signal

import numpy as np
import pytest
import torch

from cosmos_rl_core.algorithms.config import AlgorithmConfig
from cosmos_rl_core.algorithms.rules import group_rules
from cosmos_rl_core.errors import SampleError
from cosmos_rl_core.parallel.setup import ModelSetup
from cosmos_rl_core.types import Prompt, RolloutGroup, Share
from cosmos_rl_vla.actions import ActionStats
from cosmos_rl_vla.build import build_engine, build_policy
from cosmos_rl_vla.config import ActionNoiseSection as Noise
from cosmos_rl_vla.config import VLADataConfig, VLAModelConfig, VLASampling, VLATorchOptions
from cosmos_rl_vla.data.rows import load_rows
from cosmos_rl_vla.policy.collate import collate

DATA = VLADataConfig(simulator="reach", tasks=("red", "green"), options={"image_size": 16, "max_steps": 20})
SAMPLING = VLASampling(max_steps=10)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    directory = tmp_path_factory.mktemp("stats")
    ActionStats.unit(2).save(directory)
    return VLAModelConfig(
        action_dim=2,
        state_dim=2,
        horizon=4,
        words=("reach the red green square",),
        stats=str(directory / "action_stats.json"),
    )


def prompts(*places, data=DATA):
    rows, _ = load_rows(data)
    return [Prompt(sample_id=place, row=rows[place]) for place in places]


def generate(model, wanted, *, processes=1, slots=2, num_samples=1, sampling=SAMPLING, data=DATA, during=None):
    """Rollouts of each prompt, all asked for at once."""

    async def run():
        options = VLATorchOptions(processes=processes, slots=slots)
        engine = await asyncio.to_thread(build_engine, model, data=data, options=options)
        try:
            await engine.switch(3, lambda: None)
            asked = [
                asyncio.create_task(
                    engine.generate(prompt, num_samples=num_samples, sampling=sampling, seed=prompt.sample_id)
                )
                for prompt in wanted
            ]
            if during is not None:
                await during(engine)
            return [rollouts for _, rollouts in await asyncio.gather(*asked)]
        finally:
            await engine.close()

    return asyncio.run(asyncio.wait_for(run(), 120))


def test_episodes_are_the_same_in_whichever_slots_and_batches_they_run(model):
    wanted = prompts(0, 1, 2)
    alone = generate(model, wanted, processes=1, slots=1, num_samples=2)
    together = generate(model, wanted, processes=2, slots=3, num_samples=2)
    for left, right in zip(alone, together, strict=True):
        for one, other in zip(left, right, strict=True):
            np.testing.assert_array_equal(one.arrays["images"], other.arrays["images"])
            np.testing.assert_allclose(one.rollout_logprobs, other.rollout_logprobs, atol=1e-4)
    first, second = alone[0]
    np.testing.assert_array_equal(first.arrays["images"][0], second.arrays["images"][0])  # the same initial state
    assert not np.array_equal(first.arrays["replay/after"], second.arrays["replay/after"])  # their own noise


def test_the_policy_finds_the_log_probabilities_and_values_of_the_rollout(model):
    rollouts = [rollout for each in generate(model, prompts(0, 1), num_samples=2) for rollout in each]
    group = RolloutGroup(prompt=Prompt(sample_id=0, row={}), rollouts=tuple(rollouts))
    policy = build_policy(model, data=DATA, sampling=SAMPLING, seed=0, setup=ModelSetup())
    assert not any(module.training for module in policy.module.modules())  # no dropout, as in the engine
    batch = collate([group], microbatch_terms=30, share=Share())
    assert len(batch.microbatches) > 1
    for microbatch in batch.microbatches:
        outputs = policy.forward(microbatch)
        trained = microbatch.terms.loss_mask > 0
        torch.testing.assert_close(
            outputs.logprobs[trained], microbatch.terms.rollout_logprobs[trained], atol=1e-4, rtol=0
        )
        torch.testing.assert_close(outputs.values, microbatch.terms.values, atol=1e-5, rtol=0)


def test_an_episode_at_its_limit_is_bootstrapped_and_one_that_ends_is_not(model):
    (rollout,) = generate(model, prompts(0), sampling=VLASampling(max_steps=6))[0]
    assert rollout.arrays["valid"].sum() == 6  # the second chunk of four was cut short
    assert rollout.finish_reason == "length" and rollout.episode.values[-1] != 0.0
    (failed,) = generate(model, prompts(0), sampling=VLASampling(max_steps=6, bootstrap=False))[0]
    assert failed.finish_reason == "length" and failed.episode.values[-1] == 0.0
    rules = group_rules(AlgorithmConfig(name="ppo"), max_terms=10)
    assert np.isfinite(rules.of_steps(rollout.episode).advantages).all()


def test_versions_are_those_of_each_decision_and_decide_its_noise(model):
    model = model.model_copy(update={"noise": Noise(level=0.5, level_end=0.1, level_steps=4)})

    async def switch_later(engine):
        while engine.progress < 1:
            await asyncio.sleep(0.001)
        await engine.switch(4, lambda: None)

    rollouts = generate(model, prompts(0, 1, 2, 3), slots=1, during=switch_later)
    versions = np.concatenate([rollout.versions for (rollout,) in rollouts])
    assert versions.min() == 3 and versions.max() == 4
    for (rollout,) in rollouts:
        assert (np.diff(rollout.versions) >= 0).all()
        of_decisions = rollout.versions.reshape(len(rollout.arrays["valid"]), -1)[:, 0]
        np.testing.assert_allclose(rollout.arrays["replay/level"], 0.5 - 0.1 * of_decisions, rtol=1e-6)


def test_a_greedy_episode_says_nothing_to_learn_from_and_is_the_same_twice(model):
    sampling = SAMPLING.evaluation(temperature=0.0, max_terms=None)
    once, twice = (generate(model, prompts(0), sampling=sampling)[0][0] for _ in range(2))
    np.testing.assert_array_equal(once.arrays["images"], twice.arrays["images"])
    assert not once.rollout_logprobs.any() and "replay/after" not in once.arrays


def test_episodes_of_a_killed_process_are_played_again(model):
    async def kill(engine):
        while engine.progress < 2:
            await asyncio.sleep(0.001)
        os.kill(engine.simulators.process_ids[0], signal.SIGKILL)

    whole = generate(model, prompts(*range(6)), processes=2, slots=1)
    disturbed = generate(model, prompts(*range(6)), processes=2, slots=1, during=kill)
    for left, right in zip(whole, disturbed, strict=True):
        np.testing.assert_array_equal(left[0].arrays["images"], right[0].arrays["images"])


def test_a_task_that_does_not_exist_fails_its_prompt_with_the_reason(model):
    wrong = Prompt(sample_id=0, row={"task": "purple", "init": 0, "instruction": "reach the red square"})
    with pytest.raises(SampleError, match="purple"):
        generate(model, [wrong])


def test_an_instruction_that_is_too_long_fails_its_prompt_alone(model):
    row = {"task": "red", "init": 0, "instruction": "reach " * 100, "perturb": "none"}
    with pytest.raises(SampleError, match="the maximum is 24"):
        generate(model, [Prompt(sample_id=0, row=row, origin="tasks:1")])


def test_pictures_can_be_hidden_and_instructions_swapped(model):
    grey = DATA.model_copy(update={"perturb": ("grey_images",)})
    (rollout,) = generate(model, prompts(0, data=grey), data=grey)[0]
    assert (rollout.arrays["images"] == 128).all()
    swapped = load_rows(DATA.model_copy(update={"perturb": ("swap_instruction",)}))[0]
    straight = load_rows(DATA)[0]
    assert swapped[0]["instruction"] == straight[1]["instruction"] and swapped[0]["task"] == straight[0]["task"]


def test_initial_states_of_evaluation_are_never_those_of_training():
    train = {row["init"] for row in load_rows(DATA)[0]}
    held_out = {row["init"] for row in load_rows(DATA.model_copy(update={"split": "held_out"}))[0]}
    assert not train & held_out and len(held_out) == DATA.num_inits

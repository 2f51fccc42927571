"""max_staleness = 0 is the synchronous loop: processes, sockets, spools and weight sync change not one bit of the
weights."""

import asyncio
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from safetensors.torch import load_file

from cosmos_rl_core import assemble, run
from cosmos_rl_core.recipe.load import load_config, load_domain
from cosmos_rl_core.types import Share

STEPS = 10


async def synchronous_loop(config):
    """Train by hand, one prompt after another: prompt -> engine -> reward -> advantage -> batch -> trainer."""
    domain = load_domain(config.run.domain)
    source = assemble.build_source(config)
    trainer = assemble.build_trainer(config, domain)
    engine = assemble.build_engine(config, domain)
    rollouter = assemble.build_rollouter(config, domain, engine)
    collate = assemble.build_collate(config, domain, Share())
    live, trained = engine.weights(), trainer.policy.weights()

    def apply():
        with torch.no_grad():
            for name, tensor in live.items():
                tensor.copy_(trained[name])

    await engine.switch(0, apply)
    for step in range(config.run.max_steps):
        first = step * config.policy.prompts_per_step
        prompts = [source[first + i] for i in range(config.policy.prompts_per_step)]
        batch = collate([await rollouter.run(prompt) for prompt in prompts])
        trainer.begin(batch)
        trainer.forward_backward(batch.microbatches)
        trainer.optim_step()
        await engine.switch(step + 1, apply)
    await engine.close()
    return trainer


def weights_by_hand(config):
    """The weights of the synchronous loop."""
    with ThreadPoolExecutor(1) as thread:  # torch's threads belong to the thread that made them
        trainer = thread.submit(asyncio.run, synchronous_loop(config)).result()
    return {name: tensor.detach() for name, tensor in trainer.policy.weights().items()}


def weights_in(directory):
    found = {}
    for file in sorted(directory.glob("*.safetensors")):
        found |= load_file(file)
    return found


def same_bits(left, right):
    assert left.keys() == right.keys()
    differing = [name for name in left if not torch.equal(left[name], right[name])]
    return not differing


@pytest.mark.parametrize(
    ("domain", "engine"),
    [("bandit", {}), ("sums", {"rollout__options": {"batch_invariant": True}})],
    ids=["bandit", "sums"],
)
def test_a_run_on_policy_has_the_bits_of_the_synchronous_loop(domain, engine, request, tmp_path, one_thread):
    recipe = request.getfixturevalue(domain)
    changes = {"run__max_steps": STEPS, "sync__max_staleness": 0, **engine}
    tables = recipe(tmp_path / "run", run__placement="inline", **changes)
    by_hand = weights_by_hand(load_config(tables))
    after_one_step = weights_by_hand(load_config(tables, ["run.max_steps=1"]))
    assert not same_bits(by_hand, after_one_step), "nothing was learnt, so that equality would prove nothing"

    result = run(tables)
    assert result.steps == STEPS
    assert max(line["staleness_max"] for line in result.metrics) == 0
    assert same_bits(weights_in(result.checkpoint / "policy"), by_hand)

    in_processes = recipe(
        tmp_path / "in_processes",
        run__placement="local",
        **changes,
        rollout__spool={"threshold_bytes": 0},
        eval__every_steps=4,
        eval__data=tables.get("data", {}),
    )
    evaluated = run(in_processes)
    assert sorted(evaluated.evaluations) == [0, 4, 8, STEPS]
    assert same_bits(weights_in(evaluated.checkpoint / "policy"), by_hand)


def test_a_resumed_run_has_the_bits_of_an_unbroken_one(bandit, tmp_path, one_thread):
    changes = {"run__placement": "inline", "sync__max_staleness": 0, "checkpoint__every_steps": 3}
    unbroken = run(bandit(tmp_path / "unbroken", run__max_steps=8, **changes))
    run(bandit(tmp_path / "broken", run__max_steps=3, **changes))
    resumed = run(bandit(tmp_path / "broken", run__max_steps=8, **changes), resume="auto")
    assert [line["step"] for line in resumed.metrics] == [3, 4, 5, 6, 7]
    assert same_bits(weights_in(resumed.checkpoint / "policy"), weights_in(unbroken.checkpoint / "policy"))

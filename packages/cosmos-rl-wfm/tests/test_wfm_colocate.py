"""[run] colocate: a world model's policy and its engine take turns on the same GPU."""

import asyncio
import importlib
import json
from itertools import pairwise

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from wfm_fixtures import lines_of, mock_data, pixel_model, recipe, save_pipeline

from cosmos_rl_core import assemble, run
from cosmos_rl_core.parallel.offload.swap import tensors_of
from cosmos_rl_core.train.trainer import Trainer
from cosmos_rl_core.types import Prompt
from cosmos_rl_wfm.build import build_engine
from cosmos_rl_wfm.data.config import WFMDataConfig
from cosmos_rl_wfm.engines.torch import FlowEngine, WFMTorchOptions
from cosmos_rl_wfm.models.config import WFMModelConfig
from cosmos_rl_wfm.sampling import FlowSampling
from doubles.pretend_cuda import pretend_cuda

pytestmark = pytest.mark.usefixtures("one_thread")

STEPS = 2
SLOW = (pytest.mark.ci, pytest.mark.slow)
WAN = {"family": "wan", "tiny": True, "text": {"encoder": "words"}}
CLIPS = {"kind": "mock", "size": {"frames": 5, "height": 32, "width": 32}, "mock": {"rows": 4}}
GUIDED = {"num_steps": 3, "guidance": 4.0, "window": "fixed", "steps": [0, 1]}
CLEAN = {"num_steps": 3, "rule": "ode", "old_decay": "slow"}
PIXELS = pixel_model().model_dump(mode="json", exclude_none=True)

ARMS = {
    "reference and average": {
        "model": WAN | {"ema": {"decay": 0.9}},
        "data": CLIPS,
        "algorithm": {"name": "flow_grpo", "kl_coef": 0.04},
        "rollout": {"group_size": 2, "sampling": GUIDED},
    },
    "second weights": {
        "model": PIXELS | {"ema": {"decay": 0.9}},
        "algorithm": {"name": "nft", "kl_coef": 0.1},
        "rollout": {"group_size": 3, "sampling": CLEAN},
    },
    "average as the reference": {
        "model": PIXELS | {"ema": {"decay": 0.9, "reference": True}},
        "algorithm": {"name": "flow_grpo", "kl_coef": 0.04},
    },
    "real clips": {
        "model": WAN,
        "data": CLIPS,
        "algorithm": {"name": "ddrl"},
        "data_regularization": {"coef": 0.01, "rows_per_step": 2},
        "rollout": {"group_size": 2, "sampling": GUIDED},
    },
}


@pytest.fixture
def gpu():
    """The pretend GPU, after the imports that check for one."""
    for module in (
        "cosmos_rl_wfm.build",
        "diffusers.models.transformers.transformer_wan",
        "diffusers.models.autoencoders",
    ):
        importlib.import_module(module)
    with pretend_cuda() as record:
        yield record


def num_bytes(tensors):
    return sum({tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors}.values())


@pytest.mark.cuda_dry
def test_a_sleeping_engine_has_no_part_of_its_pipeline_on_the_gpu_and_answers_as_before(tmp_path, gpu):
    save_pipeline(tmp_path / "pipeline")
    model = WFMModelConfig.model_validate({"path": str(tmp_path / "pipeline")})
    sampling = FlowSampling.model_validate(GUIDED)

    async def go():
        data = WFMDataConfig.model_validate(CLIPS)
        engine = await asyncio.to_thread(build_engine, model, data=data, options=WFMTorchOptions())
        pipeline = engine._model
        parts = {
            "network": [pipeline.network],
            "codec": [pipeline.codec._vae],
            "text encoder": [pipeline.captions._encoder],
        }
        tensors = {name: [*tensors_of(*modules)] for name, modules in parts.items()}
        sizes, answers = [], []

        def measure():
            sizes.append({name: num_bytes(each) for name, each in tensors.items()})

        try:
            await engine.switch(3, lambda: None)
            measure()
            for caption in ("a red square moves", "two discs cross", "a red square moves"):
                prompt = Prompt(sample_id=0, row={"caption": caption})
                answers.append((await engine.generate(prompt, num_samples=2, sampling=sampling, seed=1))[1])
                await engine.sleep()
                measure()
                await engine.wake()
                measure()
        finally:
            await engine.close()
        return sizes, answers

    sizes, (before, _, after) = asyncio.run(asyncio.wait_for(go(), 300))
    assert not gpu.mismatches, gpu
    assert all(sizes[0].values())
    assert sizes[::2] == [sizes[0]] * 4
    assert sizes[1::2] == [dict.fromkeys(sizes[0], 0)] * 3
    for one, other in zip(before, after, strict=True):
        assert one.arrays.keys() == other.arrays.keys()
        assert all(np.array_equal(one.arrays[name], other.arrays[name]) for name in one.arrays)


class Sides:
    """The engine, the policy and its reference of a run, and the bytes of each while the other one works."""

    def __init__(self):
        self.built = {}
        self.policy, self.engine, self.policy_at_work, self.engine_at_work = [], [], [], []

    def policy_bytes(self):
        """Of all that a policy has on its device: written out here, beside the list of the product."""
        trainer, policy = self.built["trainer"], self.built["trainer"].policy
        model = policy._model
        parameters = list(tensors_of(model.network))
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        moments = [value for state in trainer.optimizer.state.values() for value in state.values() if value.dim()]
        averages = [tensor for follower in policy._followers for tensor in follower._copies.values()]
        vae = getattr(model.codec, "_vae", None)
        codec = [] if vae is None else list(tensors_of(vae))
        unconditional = policy._unconditional
        caption = [] if unconditional is None else list(unconditional.tensors().values())
        copy = getattr(self.built.get("reference"), "module", None)
        reference = [] if copy is None else list(tensors_of(copy))
        return num_bytes([*parameters, *gradients, *moments, *averages, *codec, *caption, *reference])

    def engine_bytes(self):
        model = self.built["engine"]._model
        vae = getattr(model.codec, "_vae", None)
        return num_bytes(tensors_of(model.network, *([] if vae is None else [vae])))


@pytest.fixture
def sides(monkeypatch):
    found = Sides()

    def note(name):
        build = getattr(assemble, f"build_{name}")

        def built_and_noted(*args, **kwargs):
            found.built[name] = build(*args, **kwargs)
            return found.built[name]

        monkeypatch.setattr(assemble, f"build_{name}", built_and_noted)

    for name in ("engine", "trainer", "reference"):
        note(name)
    forward_backward, denoise = Trainer.forward_backward, FlowEngine._denoise

    def train(self, microbatches):
        found.engine.append(found.engine_bytes())
        forward_backward(self, microbatches)
        found.policy_at_work.append(found.policy_bytes())

    def sample(self, batch):
        found.policy.append(found.policy_bytes())
        rollouts = denoise(self, batch)
        found.engine_at_work.append(found.engine_bytes())
        return rollouts

    monkeypatch.setattr(Trainer, "forward_backward", train)
    monkeypatch.setattr(FlowEngine, "_denoise", sample)
    return found


def learnt(directory, arm, **section):
    """The checkpoint's tensors after a run."""
    result = run(
        recipe(
            run={"domain": "wfm", "placement": "inline", "max_steps": STEPS, **section},
            checkpoint={"every_steps": 2},
            **ARMS[arm],
        ),
        [f"run.output_dir={directory}"],
    )
    assert result.steps == STEPS
    return {
        name: tensor
        for file in sorted(result.checkpoint.rglob("*.safetensors"))
        for name, tensor in load_file(file).items()
    }


@pytest.mark.cuda_dry
@pytest.mark.parametrize(
    "arm",
    [
        pytest.param("reference and average", marks=SLOW),
        pytest.param("second weights", marks=pytest.mark.ci),
        "average as the reference",
        pytest.param("real clips", marks=pytest.mark.ci),
    ],
)
def test_the_side_without_a_turn_has_no_memory_on_the_gpu_and_the_run_has_the_bits_of_one_without(
    arm, tmp_path, gpu, sides
):
    plain = learnt(tmp_path / "plain", arm)
    assert min(sides.engine) > 0 and min(sides.policy) > 0
    for seen in (sides.engine, sides.policy, sides.engine_at_work, sides.policy_at_work):
        seen.clear()
    turns = learnt(tmp_path / "turns", arm, colocate=True)
    assert not gpu.mismatches, gpu
    assert plain and plain.keys() == turns.keys()
    assert [name for name in plain if not torch.equal(plain[name], turns[name])] == []
    assert len(sides.policy_at_work) >= STEPS and sides.engine_at_work
    assert min(sides.policy_at_work) > 0 and min(sides.engine_at_work) > 0
    assert max(sides.engine) == 0
    assert max(sides.policy) == 0


@pytest.mark.parametrize("staleness", [pytest.param(0, marks=SLOW), pytest.param(1, marks=pytest.mark.ci)])
def test_processes_take_turns(staleness, tmp_path):
    run(
        recipe(
            run={"domain": "wfm", "placement": "local", "max_steps": 4, "colocate": True},
            model=PIXELS | {"ema": {"decay": 0.9}},
            data=mock_data().model_dump(mode="json", exclude_none=True),
            algorithm={"name": "nft"},
            rollout={"group_size": 3, "sampling": CLEAN},
            sync={"max_staleness": staleness},
        ),
        [f"run.output_dir={tmp_path / 'run'}"],
    )
    steps = lines_of(tmp_path / "run" / "metrics.jsonl")
    assert len(steps) == 4
    assert max(line["staleness_max"] for line in steps) <= staleness
    found = turns_of(tmp_path / "run" / "timeline.json")
    assert {role for _, _, role in found} == {"policy", "rollout"}
    for (_, end, role), (start, _, following) in pairwise(found):
        assert role == following or start >= end, f"{following} began its turn {end - start:g} us before {role} left"


def turns_of(timeline):
    """The turns of a run in the order of their starts: (start, end, role) in microseconds."""
    events = json.loads(timeline.read_text())["traceEvents"]
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    return sorted(
        (event["ts"], event["ts"] + event["dur"], names[event["pid"]].partition("-")[0])
        for event in events
        if event["name"] == "turn"
    )

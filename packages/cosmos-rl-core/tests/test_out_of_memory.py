"""A device without free memory ends the run with the part of the work, the plan's bytes and the keys to change."""

import asyncio
import json

import pytest
import torch

from cosmos_rl_core import UserError, run
from cosmos_rl_core.control import protocol as p
from cosmos_rl_core.errors import OutOfMemory
from cosmos_rl_core.observe.trace import Timeline
from cosmos_rl_core.plan import changes
from cosmos_rl_core.plan.changes import memory_advice
from cosmos_rl_core.plan.needs import STEP, MemoryPart, Needs
from cosmos_rl_core.recipe.load import load_config
from cosmos_rl_core.testing.tiny import Tiny
from cosmos_rl_core.wire.handshake import Hello
from cosmos_rl_core.workers.failure import Failure, receive_report

TEXT = "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has 9.81 MiB free. If reserved but unallocated is large"


def full(*args, **keys):
    raise torch.OutOfMemoryError(TEXT)


class Full(Tiny):
    """Its policy's forward pass finds no memory, as on a GPU."""

    def build_policy(self, *args, **keys):
        policy = super().build_policy(*args, **keys)
        policy.forward = full
        return policy


FULL = Full()


def recipe(tmp_path):
    directory = str(tmp_path / "run")
    return {
        "run": {"domain": f"{__name__}:FULL", "placement": "inline", "max_steps": 1, "output_dir": directory},
        "policy": {"prompts_per_step": 2, "threads": 1, "microbatch_terms": 512},
        "rollout": {"engine": "tiny", "group_size": 2, "threads": 1, "sampling": {"max_tokens": 3}},
        "reward": {"functions": [{"name": "hits"}]},
        "sync": {"backend": "cosmos_rl_core.testing.file_sync:FileSync"},
        "logging": {"sinks": ["jsonl"]},
    }


def failure_in(span):
    timeline = Timeline("policy-0")
    with pytest.raises(RuntimeError) as raised, timeline.span("outer"), timeline.span(span):
        full()
    return Failure.of(raised.value, timeline)


@pytest.mark.parametrize(
    ("span", "part"),
    [
        ("build", "building the model"),
        ("forward_backward", "the forward and backward pass"),
        ("optim_step", "the optimizer step"),
        ("other", "its work"),
    ],
)
def test_the_part_of_the_work_is_the_innermost_span(span, part):
    failure = failure_in(span)
    assert failure.message.startswith(f"out of GPU memory in {part}: CUDA out of memory. Tried to allocate 20.00 MiB")
    assert "reserved" not in failure.message
    assert (failure.out_of_memory, failure.user, failure.exit_code) == (True, True, 2)


def test_an_engines_error_keeps_its_cause():
    try:
        try:
            full()
        except RuntimeError as error:
            raise ValueError("the engine stopped") from error
    except ValueError as stopped:
        assert Failure.of(stopped).out_of_memory


@pytest.mark.parametrize(
    "text",
    [
        "NCCL error: unhandled cuda error\nLast error:\nFailed to CUDA calloc async 608 bytes",
        "NCCL error ... Cuda failure 2 'out of memory'",
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported",
        "Free memory on device (3.1/79.2 GiB) on startup is less than desired GPU memory utilization (0.9, 71.3 GiB).",
    ],
)
def test_a_full_device_is_recognised_in_errors_of_other_libraries(text):
    failure = Failure.of(RuntimeError(text))
    assert (failure.out_of_memory, failure.user) == (True, True)


def test_an_error_while_another_one_is_handled_keeps_it():
    try:
        try:
            full()
        except RuntimeError:
            raise ValueError("the engine could not be closed")  # noqa: B904
    except ValueError as raised:
        assert Failure.of(raised).out_of_memory
    try:
        try:
            full()
        except RuntimeError:
            raise ValueError("a smaller batch") from None
    except ValueError as raised:
        assert not Failure.of(raised).out_of_memory


def test_an_earlier_error_does_not_name_the_span():
    timeline, late = Timeline("policy-0"), torch.OutOfMemoryError(TEXT)
    with pytest.raises(KeyError), timeline.span("build"):
        raise KeyError
    assert "in its work" in Failure.of(late, timeline).message


def test_a_rank_reports_it_through_its_agent(tmp_path):
    failure = failure_in("optim_step")
    failure.write(tmp_path / "error.json")
    read = Failure.read(json.loads((tmp_path / "error.json").read_text()))
    assert read == failure

    class Connection:
        peer = Hello(name="policy-0.agent", role="agent")

        async def receive(self):
            return read.message_to_controller()

    failed = []
    asyncio.run(receive_report(Connection(), lambda *of: failed.append(of)))
    [(replica, error)] = failed
    assert replica == "policy-0"
    assert isinstance(error, OutOfMemory)
    assert error.role == "policy"


def test_a_message_without_the_field_is_another_failure():
    assert not p.Fatal(message="", user=True).out_of_memory


def test_the_run_ends_with_part_and_key(tmp_path):
    with pytest.raises(UserError) as raised:
        run(recipe(tmp_path))
    text = str(raised.value)
    assert "policy-0: out of GPU memory in the forward and backward pass: CUDA out of memory" in text
    assert "set policy.microbatch_terms=256" in text


@pytest.fixture
def counted(monkeypatch):
    """A plan with sizes, of which recomputation frees the activations; yields the sizes of GPUs it was asked for."""
    sizes = []

    def needs(shape, config, domain, *, device_bytes=None, **_):
        sizes.append(device_bytes)
        kept = 300 if config.policy.memory.activation_checkpointing == "none" else 10
        parts = (
            MemoryPart(name="parameters", bytes=100 << 20),
            MemoryPart(name="activations", bytes=kept << 20, at=(STEP,)),
        )
        return Needs(process="a policy rank", parts=parts)

    class Shape:
        tokens_per_term = 1

    monkeypatch.setattr(changes, "policy_needs", needs)
    monkeypatch.setattr(Full, "model_shape", lambda self, model, *, data, sampling: Shape())
    rollout = Needs(process="a rollout replica", parts=(MemoryPart(name="weights", bytes=7 << 20),))
    monkeypatch.setattr(changes, "rollout_needs", lambda *_, **__: rollout)
    return sizes


@pytest.mark.usefixtures("counted")
def test_the_advice_has_the_plans_bytes_and_the_cheapest_changes(tmp_path):
    text = memory_advice(load_config(recipe(tmp_path)), role="policy")
    assert text.startswith(
        "cosmos-rl plan counts 400 MiB for a policy rank: activations 300 MiB, parameters 100 MiB; set"
    )
    assert 'policy.memory.activation_checkpointing="selective"' in text.replace(" = ", "=")


@pytest.mark.usefixtures("counted")
def test_a_rollouts_advice_is_about_the_engine(tmp_path):
    text = memory_advice(load_config(recipe(tmp_path)), role="rollout")
    assert text.startswith("cosmos-rl plan counts 7 MiB for a rollout replica: weights 7 MiB; generate fewer rollouts")


def test_the_advice_is_for_the_gpu_of_the_error(tmp_path, counted):
    reason = "CUDA out of memory. GPU 0 has a total capacity of 79.25 GiB of which 9.81 MiB is free."
    memory_advice(load_config(recipe(tmp_path)), role="policy", reason=reason)
    assert set(counted) == {int(79.25 * 2**30)}

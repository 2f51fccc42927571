"""What a rank holds, whether a model fits its mesh, and what to change where it does not fit the memory."""

import math

import pytest

from cosmos_rl_core.algorithms.config import AlgorithmConfig
from cosmos_rl_core.errors import UserError
from cosmos_rl_core.parallel.config import MemorySection, ParallelSection, PolicySection
from cosmos_rl_core.parallel.dims import ParallelDims
from cosmos_rl_core.plan.changes import _changed, changes_that_fit, written
from cosmos_rl_core.plan.estimate import estimate, is_expert, layer_of
from cosmos_rl_core.plan.memory import CONTEXT_BYTES, SUM_BYTES, estimate_of, parse_bytes, policy_needs, rollout_needs
from cosmos_rl_core.plan.needs import START, STEP, UPDATE, MemoryPart, Needs
from cosmos_rl_core.plan.run_plan import MemoryPlan, _memory_texts
from cosmos_rl_core.plan.shape import ModelShape, check_fit
from cosmos_rl_core.recipe.run import RunConfig
from cosmos_rl_core.recipe.sections import RunSection, SamplingSection
from cosmos_rl_core.testing.tiny import Tiny
from cosmos_rl_core.train import replicas
from cosmos_rl_core.types import WeightSpec
from cosmos_rl_core.weight_sync import BUCKET_BYTES, GPU_BUCKET_BYTES, SyncSection

H, INNER, VOCABULARY, LAYERS = 64, 96, 500, 4


def spec(name, *shape):
    return WeightSpec(name=name, shape=shape, dtype="float32")


def layer_specs(layer):
    at = f"model.layers.{layer}"
    return [
        spec(f"{at}.input_layernorm.weight", H),
        spec(f"{at}.self_attn.q_proj.weight", H, H),
        spec(f"{at}.self_attn.k_proj.weight", 32, H),
        spec(f"{at}.self_attn.v_proj.weight", 32, H),
        spec(f"{at}.self_attn.o_proj.weight", H, H),
        spec(f"{at}.post_attention_layernorm.weight", H),
        spec(f"{at}.mlp.gate_proj.weight", INNER, H),
        spec(f"{at}.mlp.up_proj.weight", INNER, H),
        spec(f"{at}.mlp.down_proj.weight", H, INNER),
    ]


EMBEDDING, NORM = spec("model.embed_tokens.weight", VOCABULARY, H), spec("model.norm.weight", H)
HEAD = spec("lm_head.weight", VOCABULARY, H)
LAYER = 2 * H + 2 * H * H + 2 * 32 * H + 3 * H * INNER
"""Numbers in a layer."""


def shape(*, tied=False, **keys):
    specs = [EMBEDDING, *(spec for layer in range(LAYERS) for spec in layer_specs(layer)), NORM]
    sizes = {
        "num_layers": LAYERS,
        "hidden": H,
        "heads": 4,
        "kv_heads": 2,
        "head_dim": 16,
        "intermediate": INNER,
        "vocabulary": VOCABULARY,
        "weights": tuple(specs if tied else [*specs, HEAD]),
    }
    return ModelShape(**{**sizes, **keys})


def of(model=None, *, dims=None, memory=None, parallel=None, tokens=1000, **policy):
    dims = ParallelDims(**dims or {})
    section = ParallelSection(**dict(dims), ep=dims.ep, **(parallel or {}))
    policy = PolicySection(parallel=section, memory=MemorySection(**memory or {}), **policy)
    return estimate(model or shape(), dims=dims, policy=policy, tokens=tokens)


WHOLE = LAYERS * LAYER + 2 * VOCABULARY * H + H


def test_one_process_holds_everything_once_and_adam_twice_more():
    found = of()
    assert found.parameters == found.gradients == 4 * WHOLE
    assert found.optimizer == 8 * WHOLE + 4 * len(shape().weights)
    assert (found.gathered, found.reduction, found.host) == (0, 0, 0)
    assert of(optimizer={"name": "sgd"}).optimizer == 4 * WHOLE


def test_the_activations_of_a_layer_by_hand():
    # 6 H for two norms, q and its output twice, k and v, 4 for the gated feed-forward; and 4 + 2 numbers of scale.
    layer = 6 * H + 3 * 64 + 2 * 32 + 4 * INNER + 4 + 2
    two, four = (of(shape(num_layers=n), tokens=1000).activations for n in (2, 4))
    assert (four - two) / 2 / 1000 == 4 * layer


def test_recomputation_keeps_the_input_or_the_products():
    kept = {}
    for mode in ("full", "selective"):
        two, four = (of(shape(num_layers=n), memory={"activation_checkpointing": mode}).activations for n in (2, 4))
        kept[mode] = (four - two) / 2 / 1000 / 4
    assert kept["full"] == H
    assert kept["selective"] == 3 * H + 2 * 64 + 2 * 32 + 4 + 2 * INNER


def test_fully_sharded_weights_are_rows_rounded_up():
    found = of(dims={"dp_shard": 3})
    rows = [-(-weight.shape[0] // 3) * (weight.shape[1] if len(weight.shape) > 1 else 1) for weight in shape().weights]
    assert found.parameters == 4 * sum(rows)
    assert found.gathered == 4 * (2 * LAYER + 2 * VOCABULARY * H + H)
    assert found.reduction == 4 * LAYER


def test_kept_gathered_parameters_and_late_sums_cost_the_whole_model():
    found = of(dims={"dp_shard": 2}, parallel={"reshard_after_forward": False, "reduce_once": True})
    assert found.gathered == found.reduction == 4 * WHOLE


def test_tensor_parallel_ranks_hold_half_of_the_matrices_and_all_norms():
    assert of(dims={"tp": 2}).parameters == 4 * ((WHOLE - 9 * H) // 2 + 9 * H)


def test_context_parallel_ranks_have_their_part_of_the_tokens():
    assert of(dims={"cp": 2}).activations == of(dims={"dp_shard": 2}).activations / 2


def test_a_stage_holds_its_layers_for_as_many_microbatches_as_are_in_flight():
    found = of(dims={"pp": 2}, parallel={"pipeline_schedule": "1f1b"})
    assert found.parameters == 4 * (2 * LAYER + VOCABULARY * H)  # the first: two layers and the embedding
    assert found.logits == 0
    one = of(shape(num_layers=2), dims={"dp_shard": 2}, tokens=1000)
    assert found.activations > 1.7 * one.activations
    assert of(dims={"pp": 4}).activations > found.activations / 2


def test_a_tied_matrix_lies_on_the_last_stage_too():
    both = [of(shape(tied=tied), dims={"pp": 2}).parameters for tied in (True, False)]
    assert both[0] >= both[1]


def test_offloaded_weights_are_in_the_hosts_memory():
    found = of(dims={"dp_shard": 2}, memory={"parameter_offload": True})
    assert found.host == found.parameters + found.gradients + found.optimizer
    assert found.device == found.total - found.host
    assert of(memory={"parameter_offload": True}).host == 0  # one process has no shards


def test_adapters_alone_have_gradients_and_moments():
    found = of(shape(adapter_parameters=1000))
    assert found.parameters == 4 * (WHOLE + 1000)
    assert (found.gradients, found.optimizer) == (4000, 8000)


def test_frozen_weights_have_neither_gradients_nor_moments():
    frozen = next(spec for spec in shape().weights if "embed" in spec.name)
    found = of(shape(frozen=frozenset({frozen.name})))
    left = WHOLE - math.prod(frozen.shape)
    assert found.parameters == 4 * WHOLE
    assert found.gradients == 4 * left
    assert found.optimizer == 8 * left + 4 * (len(shape().weights) - 1)


def test_experts_are_cut_over_all_ranks_but_not_over_pp():
    experts = [spec(f"model.layers.0.mlp.experts.{e}.gate_proj.weight", INNER, H) for e in range(8)]
    model = shape(num_layers=1, experts=8, experts_per_token=2, expert_intermediate=INNER, weights=tuple(experts))
    assert of(model, dims={"dp_shard": 2, "tp": 2, "ep": 2}).parameters == 4 * 8 * INNER * H // 4


@pytest.mark.parametrize(
    ("name", "layer", "expert"),
    [
        ("model.layers.12.mlp.experts.3.up_proj.weight", 12, True),
        ("transformer.h.4.attn.weight", 4, False),
        ("lm_head.weight", None, False),
    ],
)
def test_names_tell_layers_and_experts(name, layer, expert):
    assert (layer_of(name), is_expert(name)) == (layer, expert)


@pytest.mark.parametrize(
    ("dims", "message"),
    [
        ({"tp": 4}, r"tp = 4 does not divide the model's 2 key-value heads"),
        ({"tp": 2, "cp": 4}, r"tp x cp = 2 x 4 = 8 does not divide the model's 4 attention heads"),
        ({"pp": 8}, r"8 stages, but the model has 4 layers"),
        ({"ep": 2, "dp_shard": 2}, r"ep = 2: the model has no experts"),
    ],
)
def test_a_model_that_cannot_be_spread_is_refused_with_the_numbers(dims, message):
    with pytest.raises(UserError, match=message):
        check_fit(shape(), ParallelSection.model_validate(dims), dims=ParallelDims(**dims))


def test_all_misfits_are_told_at_once():
    dims = {"tp": 3, "pp": 8, "dp_shard": 3, "ep": 3}
    with pytest.raises(UserError, match=r"8 stages.*4 attention heads.*2 key-value heads.*8 experts"):
        check_fit(shape(experts=8), ParallelSection.model_validate(dims), dims=ParallelDims(**dims))


def test_a_model_that_can_be_spread_is_not_refused():
    dims = {"pp": 2, "dp_shard": 2, "cp": 2, "tp": 2, "ep": 4}
    check_fit(shape(experts=8), ParallelSection.model_validate(dims), dims=ParallelDims(**dims))


@pytest.mark.parametrize(
    ("text", "size"), [("80GiB", 80 * 2**30), ("24GB", 24 * 10**9), ("1.5 MiB", 3 * 2**19), ("512", 512)]
)
def test_sizes_are_read(text, size):
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["much", "80GiBs", "-1GB", ""])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(UserError, match="such as 80GiB"):
        parse_bytes(text)


class Plain(Tiny):
    """Counts no memory of its own."""


def recipe(**policy):
    return RunConfig(run=RunSection(domain="llm"), policy=PolicySection(**policy))


def test_the_changes_that_are_told_do_fit_and_come_cheapest_first():
    config = recipe()
    needed = estimate_of(shape(), config.policy).device
    memory = needed * 7 // 10
    changes = changes_that_fit(shape(), config, Plain(), memory=memory)
    assert [written(change) for change in changes] == [
        'policy.memory.activation_checkpointing="selective"',
        "policy.microbatch_terms=4096",
    ]


def test_where_one_change_is_not_enough_several_are_put_together():
    config = recipe()
    both = PolicySection(microbatch_terms=512, memory=MemorySection(activation_checkpointing="full"))
    changes = changes_that_fit(shape(), config, Plain(), memory=estimate_of(shape(), both).device)
    assert written(changes[0]) == 'policy.memory.activation_checkpointing="full" policy.microbatch_terms=512'
    assert changes_that_fit(shape(), config, Plain(), memory=1000) == []


def test_where_a_term_takes_many_tokens_a_microbatch_may_have_few_of_them():
    sampling = SamplingSection(max_tokens=4)
    config = recipe(microbatch_terms=64, memory=MemorySection(activation_checkpointing="full"))
    config = config.model_copy(update={"rollout": config.rollout.model_copy(update={"sampling": sampling})})
    model = shape(tokens_per_term=300)
    smallest = config.policy.model_copy(update={"microbatch_terms": 4})
    changes = changes_that_fit(model, config, Plain(), memory=estimate_of(model, smallest).device)
    assert changes[0] == {"policy.microbatch_terms": 4}
    assert {"policy.microbatch_terms": 2} not in changes_that_fit(
        model, config, Plain(), memory=10**9
    )  # a rollout is whole


@pytest.mark.parametrize(
    ("keys", "change"), [({}, {"policy.parallel.dp_shard": 2}), ({"ranks_per_node": 1}, {"policy.num_nodes": 2})]
)
def test_more_ranks_are_asked_for_in_the_keys_that_the_recipe_uses(keys, change):
    sparing = {"microbatch_terms": 512, "memory": MemorySection(activation_checkpointing="full")}
    two = PolicySection(**sparing, parallel=ParallelSection(dp_shard=2))
    memory = estimate_of(shape(), two).device
    assert changes_that_fit(shape(), recipe(**sparing, **keys), Plain(), memory=memory)[0] == change


# ---- what is held beside the network


def test_the_fullest_time_is_what_counts():
    parts = (
        MemoryPart(name="always", bytes=10),
        MemoryPart(name="whole", bytes=50, at=(START,)),
        MemoryPart(name="work", bytes=30, at=(STEP,)),
        MemoryPart(name="other work", bytes=20, at=("clips are encoded",)),
        MemoryPart(name="both", bytes=5, at=(STEP, "clips are encoded")),
        MemoryPart(name="elsewhere", bytes=1000, host=True),
        MemoryPart(name="who knows", bytes=None),
    )
    needs = Needs(process="a rank", parts=parts)
    assert (needs.device, needs.fullest, needs.host) == (50, START, 1000)  # before anything else is there
    assert Needs(process="a rank", parts=(*parts[:1], *parts[2:])).device == 45
    assert needs.unknown == ("who knows",)
    assert Needs(process="a rank", parts=parts[:1]).device == 10


class Counting(Tiny):
    """Counts memory."""

    def __init__(self, *, own_reference=False, policy=(), rollout=()):
        self.own_reference, self.policy, self.rollout = own_reference, policy, rollout

    def is_own_reference(self, config):
        return self.own_reference

    def held_by_policy(self, config, rank):
        return self.policy

    def held_by_rollout(self, config):
        return self.rollout


def rl_recipe(**algorithm):
    config = recipe()
    return config.model_copy(update={"algorithm": AlgorithmConfig(name="grpo", **algorithm)})


def test_a_reference_is_a_second_model_but_for_adapters_and_policies_that_have_one():
    without = policy_needs(shape(), rl_recipe(), Plain()).device
    held = rl_recipe(kl_coef=0.1)
    assert policy_needs(shape(), held, Plain()).device == without + 4 * WHOLE
    assert policy_needs(shape(), held, Counting(own_reference=True)).device == without
    adapters = shape(adapter_parameters=1000)
    assert policy_needs(adapters, held, Plain()).device == policy_needs(adapters, rl_recipe(), Plain()).device


def test_what_a_domain_counts_has_to_fit_too():
    more = Counting(policy=[MemoryPart(name="encoder", bytes=2**30)])
    config = rl_recipe()
    needed = policy_needs(shape(), config, more).device
    assert needed == policy_needs(shape(), config, Plain()).device + 2**30
    for change in changes_that_fit(shape(), config, more, memory=needed - 1):
        assert policy_needs(shape(), changed(config, change), more).device < needed
    assert changes_that_fit(shape(), config, more, memory=2**30) == []


def changed(config, change):
    return config.model_copy(update={"policy": _changed(config.policy, change)})


RECEIVED = 2 * BUCKET_BYTES


def test_a_rollout_replica_has_the_weights_in_the_type_it_computes_in_and_a_version_on_the_host():
    needs = rollout_needs(shape(compute_dtype="bfloat16"), rl_recipe(), Plain())
    assert needs is not None and needs.unknown
    assert (needs.device, needs.host) == (2 * WHOLE, 2 * WHOLE + RECEIVED)  # sent in the engine's dtype
    adapters = rollout_needs(shape(adapter_parameters=1000), rl_recipe(), Counting())
    assert adapters is not None and not adapters.unknown
    assert (adapters.device, adapters.host) == (4 * (WHOLE + 1000), 4000 + RECEIVED)  # adapters alone are sent


@pytest.mark.parametrize(("transport", "on_device"), [("nixl", 0), ("nixl_vram", 2 * 2**20), ("cuda_ipc", 2 * 2**20)])
def test_buckets_between_gpus_are_received_on_the_gpu(transport, on_device):
    sync = SyncSection(transport=transport, bucket_bytes=2**20, staging="in_place")
    config = rl_recipe().model_copy(update={"sync": sync})
    needs = rollout_needs(shape(), config, Counting())
    assert needs is not None
    assert (needs.device, needs.host) == (4 * WHOLE + on_device, 2 * 2**20 - on_device)


class Half(Counting):
    """Its engines have a dtype of their own."""

    def engine_dtype(self, config, *, computed):
        return "float16"


def test_an_engine_with_a_dtype_of_its_own_holds_and_receives_that():
    needs = rollout_needs(shape(), rl_recipe(), Half())
    assert needs is not None
    assert (needs.device, needs.host) == (2 * WHOLE, 2 * WHOLE + RECEIVED)
    policy = {part.name: part.bytes for part in policy_needs(shape(), rl_recipe(), Half()).parts}
    assert policy["version that an engine still reads"] == 2 * WHOLE


@pytest.mark.parametrize(
    ("sync", "gpu", "copies", "slots"),
    [
        ({}, False, 4 * WHOLE, 2 * BUCKET_BYTES),
        ({}, True, 8 * WHOLE, 2 * GPU_BUCKET_BYTES),
        ({"dtype": "bfloat16"}, True, 4 * WHOLE, 2 * GPU_BUCKET_BYTES),
        ({"delta": True}, True, 4 * WHOLE, 2 * GPU_BUCKET_BYTES),
        ({"bucket_bytes": 2**20, "transport": "cuda_ipc"}, True, 8 * WHOLE, 0),
        ({"bucket_bytes": 2**20, "transport": "nixl_vram"}, True, 8 * WHOLE, 0),
    ],
)
def test_published_versions_are_held_in_the_hosts_memory(sync, gpu, copies, slots):
    config = rl_recipe().model_copy(update={"sync": SyncSection(**sync)})
    needs = policy_needs(shape(), config, Plain(), gpu=gpu)
    assert needs.host == copies + slots
    on_device = 0 if slots else 2 * 2**20
    tested = sum(part.bytes for part in needs.parts if part.name == "buckets being sent from GPU to GPU")
    assert needs.device - tested == policy_needs(shape(), rl_recipe(), Plain()).device + CONTEXT_BYTES * gpu + on_device


WEIGHTS = MemoryPart(name="weights", bytes=10)


def memory_of(*, given, shared=False, in_turns=False, policy=(), rollout=(WEIGHTS,)):
    policy = Needs(process="a policy rank", parts=(MemoryPart(name="parameters", bytes=60), *policy))
    return MemoryPlan(
        rank=of(),
        policy=policy,
        rollout=Needs(process="a rollout replica", parts=rollout),
        shared=shared,
        in_turns=in_turns,
        given=given,
    )


def test_nothing_is_said_to_fit_while_a_part_of_it_is_not_known():
    assert memory_of(given=None).fits is None
    assert memory_of(given=60).fits is True
    assert memory_of(given=59).fits is False
    unknown = (MemoryPart(name="cache", bytes=None),)
    assert memory_of(given=60, rollout=unknown).fits is None
    assert memory_of(given=59, rollout=unknown).fits is False
    assert memory_of(given=1, rollout=unknown).unknown == ("a rollout replica: cache",)


def test_processes_on_one_device_have_to_fit_together_and_others_each():
    assert memory_of(given=69, shared=True).fits is False
    assert memory_of(given=70, shared=True).fits is True
    assert memory_of(given=60, rollout=(MemoryPart(name="weights", bytes=61),)).fits is False


def test_in_turns_the_larger_one_has_to_fit_beside_the_context_of_the_other():
    contexts = {"policy": (MemoryPart(name="CUDA context", bytes=3), MemoryPart(name="2 NCCL communicators", bytes=4))}
    rollout = (WEIGHTS, MemoryPart(name="CUDA context", bytes=5))
    found = memory_of(given=71, in_turns=True, rollout=rollout, **contexts)
    assert (found.devices, found.fits) == ((72,), False)
    assert memory_of(given=72, in_turns=True, rollout=rollout, **contexts).fits is True
    large = memory_of(
        given=100, in_turns=True, rollout=(MemoryPart(name="weights", bytes=90), *rollout[1:]), **contexts
    )
    assert large.devices == (102,)


def test_in_turns_each_side_is_in_the_hosts_memory_while_the_other_works():
    alone = rl_recipe()
    turns = alone.model_copy(update={"run": RunSection(domain="tiny", colocate=True)})
    for find in (policy_needs, rollout_needs):
        for gpu in (False, True):
            before, after = find(shape(), alone, Plain(), gpu=gpu), find(shape(), turns, Plain(), gpu=gpu)
            assert before is not None and after is not None
            assert after.device == before.device
            assert (after.host > before.host) is gpu
    weights = (
        rollout_needs(shape(), turns, Plain(), gpu=True).host - rollout_needs(shape(), alone, Plain(), gpu=True).host
    )
    assert weights == 4 * WHOLE


@pytest.mark.parametrize("given", [60, 100])
def test_what_fits_is_never_said_without_what_is_not_counted(given):
    text = "\n".join(_memory_texts(memory_of(given=given)))
    assert "what is counted fits into" in text and "not counted" in text
    assert "\nfits" not in text


def test_entropies_take_a_second_buffer_of_logits():
    head = 2 * VOCABULARY * H * 4
    big = {"vocabulary": 10**6, "num_layers": 1}
    with_entropy, without = (
        estimate(shape(**big), dims=ParallelDims(), policy=PolicySection(), tokens=1000, with_entropy=each)
        for each in (True, False)
    )
    assert with_entropy.logits == without.logits > head
    assert with_entropy.backward == max(with_entropy.logits, without.backward)


def test_products_in_bfloat16_have_logits_of_their_own():
    found = of(shape(compute_dtype="bfloat16", vocabulary=10**6))
    assert found.backward == 4 * 10**6 * H + 3 * 4 * H * 1000 + found.logits // 2  # the head's gradient, hidden states


@pytest.mark.parametrize(
    ("sync", "gpu", "slots"),
    [({}, True, 2 * GPU_BUCKET_BYTES), ({}, False, 0), ({"delta": True}, True, 0), ({"transport": "shm"}, True, 0)],
)
def test_slots_of_a_path_between_gpus_that_auto_tests_are_on_the_gpu(sync, gpu, slots):
    config = rl_recipe().model_copy(update={"sync": SyncSection(**sync)})
    parts = policy_needs(shape(), config, Plain(), gpu=gpu).parts
    counted = [part.bytes for part in parts if part.name == "buckets being sent from GPU to GPU" and not part.host]
    assert sum(counted) == slots


@pytest.mark.parametrize(
    ("policy", "names"),
    [
        ({}, set()),
        ({"replicas": 2}, {"gradients of all replicas, in buckets"}),
        (
            {"replicas": 2, "minibatches": 2},
            {"gradients of all replicas, in buckets", "trained weights and moments, to undo a step"},
        ),
        ({"precision": {"parameters": "bfloat16"}}, {"a parameter in float32, while it is rounded"}),
    ],
)
def test_an_update_takes_memory_of_its_own(policy, names):
    config = recipe(**policy)
    needs = policy_needs(shape(), config, Plain())
    found = {part.name: part.bytes for part in needs.parts if UPDATE in part.at}
    assert set(found) == names
    rank = estimate_of(shape(), config.policy)
    sizes = {
        "gradients of all replicas, in buckets": rank.gradients,
        "trained weights and moments, to undo a step": rank.gradients + rank.optimizer,
        "a parameter in float32, while it is rounded": 33 * VOCABULARY * H,
    }
    assert found == {name: sizes[name] for name in names}


@pytest.mark.parametrize(("rows", "window"), [(1 << 16, SUM_BYTES), (1 << 20, 2 * 4 * H << 20)])
def test_sums_over_replicas_take_a_window_of_the_gradients(rows, window):
    """A tensor that is larger than half of the window is a half by itself."""
    assert replicas.WINDOW * replicas.BUCKET_BYTES == SUM_BYTES
    config = recipe(replicas=2)
    model = shape(weights=tuple(spec(f"model.layers.{i}.mlp.up_proj.weight", rows, H) for i in range(40)))
    bytes_of = {part.name: part.bytes for part in policy_needs(model, config, Plain()).parts}
    assert bytes_of["gradients of all replicas, in buckets"] == window < estimate_of(model, config.policy).gradients

"""Learning from a teacher: divergences in chunks, over ranks, and equal to TRL's and to plain transformers."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from llm_parity import FAMILIES, make_batch, make_tiny, vision_of
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from cosmos_rl_core.algorithms.config import AlgorithmConfig, TeacherSection
from cosmos_rl_core.algorithms.distill import TaughtObjective, divergence
from cosmos_rl_core.algorithms.objective import build_objective
from cosmos_rl_core.errors import UserError
from cosmos_rl_core.parallel.axes.tensor import TensorAxis
from cosmos_rl_core.parallel.config import ParallelSection
from cosmos_rl_core.parallel.dims import ParallelDims
from cosmos_rl_core.parallel.mesh import ReplicaMesh
from cosmos_rl_core.parallel.setup import ModelSetup
from cosmos_rl_core.parallel.stages import microbatch_multiple
from cosmos_rl_core.train.optimizers.build import build_optimizer
from cosmos_rl_core.train.trainer import Trainer
from cosmos_rl_core.types import Share
from cosmos_rl_llm.media.vision import find_family
from cosmos_rl_llm.model.causal_lm import make_model
from cosmos_rl_llm.model.output_head import OutputHead, Vocabulary
from cosmos_rl_llm.policy.pipelined import PipelinedPolicy
from cosmos_rl_llm.policy.policy import CausalLMPolicy
from cosmos_rl_llm.policy.token_model import TermOptions
from cosmos_rl_llm.teacher.check import check_length, check_tokens, first_difference
from cosmos_rl_llm.teacher.divergence import Top, Whole, term_divergence, with_rest
from cosmos_rl_llm.teacher.teacher import LLMTeacher, check_processing
from doubles.ranks import run_ranks

AXES = ("dp_replicate", "dp_shard", "cp", "tp", "pp")
TERMS, VOCABULARY, HIDDEN, TEACHERS = 23, 31, 8, 12

every_beta = pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])


class Sizes(TorchDispatchMode):
    """Notes the most elements of any tensor that an operator returns."""

    most = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        self.most = max(self.most, *sizes, 0)
        return result


def random(seed, *shape, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


TRL = {  # loss, norm of its gradient, and one element of it
    0.0: (1.9131711145518089, 0.5975273059636386, 0.006960043590038153),
    0.1: (0.1322763357290016, 0.03783569602549417, 0.00027385018529283133),
    0.5: (0.3324926274643311, 0.10555133066394778, 0.0007676264067474842),
    1.0: (3.5309700941268773, 1.7959249715325898, 0.008037491631847112),
}
"""By beta: `GKDTrainer.generalized_jsd_loss` of TRL 1.16.0 in float64, temperature 0.7, for the logits of `trl_logits`
with labels (1, -100, 2, 3). In the environment that `benchmarks/_peer_env.py` makes for TRL this prints a row again:

    import torch
    from trl.experimental.gkd.gkd_trainer import GKDTrainer
    n = torch.arange(28, dtype=torch.float64).view(1, 4, 7)
    student, teacher, labels = 2 * torch.sin(n * 1.7), 3 * torch.cos(n * 0.9 + 1), torch.tensor([[1, -100, 2, 3]])
    student.requires_grad_()
    loss = GKDTrainer.generalized_jsd_loss(student, teacher, labels=labels, beta=0.5, temperature=0.7)
    loss.backward()
    print(loss.item(), student.grad.norm().item(), student.grad[0, 0, 2].item())
"""


def trl_logits():
    n = torch.arange(4 * 7, dtype=torch.float64).view(4, 7)
    return 2 * torch.sin(n * 1.7), 3 * torch.cos(n * 0.9 + 1)


@pytest.mark.parametrize("beta", TRL)
@pytest.mark.parametrize("terms_at_a_time", [1, 4])
def test_the_loss_is_trls(beta, terms_at_a_time):
    student, teacher = trl_logits()
    student.requires_grad_()
    head = OutputHead(torch.eye(7, dtype=torch.float64), None)
    values, *_ = term_divergence(
        student,
        head,
        Whole(teacher, head, 0.7, Vocabulary.all(7)),
        beta=beta,
        temperature=0.7,
        logits_bytes=6 * 4 * 7 * terms_at_a_time,
    )
    loss = values[[0, 2, 3]].mean()
    loss.backward()
    found = (loss.item(), student.grad.norm().item(), student.grad[0, 2].item())
    assert found == pytest.approx(TRL[beta], rel=1e-9, abs=1e-9)


def heads(softcap):
    """The policy's head with rows for more tokens than the teacher's."""
    policy = OutputHead(random(0, VOCABULARY + 3, HIDDEN), random(1, VOCABULARY + 3), softcap, 0.8)
    return policy, OutputHead(random(2, VOCABULARY, TEACHERS), random(3, VOCABULARY), None)


def classes_of(teacher_hidden, teacher, *, top_k):
    if not top_k:
        return Whole(teacher_hidden, teacher, 0.7, Vocabulary.all(VOCABULARY))
    logprobs = (teacher.logits(teacher_hidden) / 0.7).log_softmax(-1)
    ids = logprobs.topk(top_k, dim=-1).indices
    return Top(ids, with_rest(logprobs, ids, Vocabulary.all(VOCABULARY)), Vocabulary.all(VOCABULARY))


def by_autograd(hidden, head, teacher_hidden, teacher, *, beta, top_k):
    """The same over whole tensors: divergences [T]."""
    policy = (head.logits(hidden)[:, :VOCABULARY] / 0.7).log_softmax(-1)
    of_teacher = (teacher.logits(teacher_hidden) / 0.7).log_softmax(-1)
    if top_k:
        ids = of_teacher.topk(top_k, dim=-1).indices
        rest = [(1 - each.gather(1, ids).exp().sum(-1, keepdim=True)).log() for each in (policy, of_teacher)]
        policy = torch.cat([policy.gather(1, ids), rest[0]], dim=1)
        of_teacher = torch.cat([of_teacher.gather(1, ids), rest[1]], dim=1)
    return divergence(policy, of_teacher, beta=beta)


@every_beta
@pytest.mark.parametrize("top_k", [0, 4])
@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("terms_at_a_time", [100, 5])
def test_values_and_gradients_are_those_of_whole_tensors(beta, top_k, softcap, terms_at_a_time):
    slopes = torch.linspace(-1, 2, TERMS, dtype=torch.float64)
    teacher_hidden = random(5, TERMS, TEACHERS)
    found = {}
    for name in ("chunks", "whole"):
        hidden, (head, teacher) = random(4, TERMS, HIDDEN), heads(softcap)
        leaves = (hidden, head.weight, head.bias)
        for leaf in leaves:
            leaf.requires_grad_()
        if name == "whole":
            values = by_autograd(hidden, head, teacher_hidden, teacher, beta=beta, top_k=top_k)
        else:
            values, reverse, agreement = term_divergence(
                hidden,
                head,
                classes_of(teacher_hidden, teacher, top_k=top_k),
                beta=beta,
                temperature=0.7,
                logits_bytes=6 * 4 * VOCABULARY * terms_at_a_time,
            )
            torch.testing.assert_close(
                reverse, by_autograd(hidden, head, teacher_hidden, teacher, beta=1.0, top_k=top_k).detach()
            )
            likeliest = head.logits(hidden)[:, :VOCABULARY].argmax(-1) == teacher.logits(teacher_hidden).argmax(-1)
            assert agreement.tolist() == likeliest.double().tolist() and 0 < agreement.sum() < TERMS
        (slopes * values).sum().backward()
        found[name] = [values.detach(), *(leaf.grad for leaf in leaves)]
    torch.testing.assert_close(found["chunks"], found["whole"], rtol=1e-9, atol=1e-9)


def test_all_tokens_but_one_are_the_whole_vocabulary():
    (head, teacher), teacher_hidden = heads(None), random(5, TERMS, TEACHERS)
    results = [
        term_divergence(
            random(4, TERMS, HIDDEN),
            head,
            classes_of(teacher_hidden, teacher, top_k=top_k),
            beta=0.3,
            temperature=0.7,
            logits_bytes=10**6,
        )
        for top_k in (0, VOCABULARY - 1)
    ]
    torch.testing.assert_close(*results)


def test_no_tensor_holds_all_terms_over_the_vocabulary():
    hidden, (head, teacher) = random(4, 200, HIDDEN).requires_grad_(), heads(None)
    head.weight.requires_grad_()
    with Sizes() as sizes:
        values, *_ = term_divergence(
            hidden,
            head,
            Whole(random(5, 200, TEACHERS), teacher, 1.0, Vocabulary.all(VOCABULARY)),
            beta=0.5,
            temperature=1.0,
            logits_bytes=6 * 4 * VOCABULARY * 10,
        )
        values.sum().backward()
    assert sizes.most <= max(200 * TEACHERS, (VOCABULARY + 3) * HIDDEN) < 200 * VOCABULARY


def test_a_policy_far_from_its_teacher_has_finite_gradients():
    hidden = torch.tensor([[200.0, -200.0, 0.0]]).requires_grad_()
    head = OutputHead(torch.eye(3), None)
    teacher = Whole(torch.tensor([[-200.0, 200.0, 0.0]]), head, 1.0, Vocabulary.all(3))
    for beta in (0.0, 0.5, 1.0):
        values, *_ = term_divergence(hidden, head, teacher, beta=beta, temperature=1.0, logits_bytes=10**6)
        (gradient,) = torch.autograd.grad(values.sum(), hidden)
        assert values.isfinite().all() and gradient.isfinite().all()
    assert torch.autograd.grad(
        term_divergence(hidden, head, teacher, beta=0.0, temperature=1.0, logits_bytes=10**6)[0].sum(), hidden
    )[0].tolist() == [[1.0, -1.0, 0.0]]


def sharded(rank, world_size, *, beta, top_k, softcap):
    """Values and gradients with the vocabulary over the ranks; this rank's rows of the head's gradient."""
    mesh = ReplicaMesh.build(ParallelDims(tp=world_size), device=torch.device("cpu"))
    part = Vocabulary.part(VOCABULARY + 3, TensorAxis(mesh.axis("tp"), sequence=False))
    hidden, (head, teacher), theirs = random(4, TERMS, HIDDEN), heads(softcap), random(5, TERMS, TEACHERS)
    own, common = part.rows(head), part.within(VOCABULARY)
    leaves = (hidden, own.weight, own.bias)
    for leaf in leaves:
        leaf.requires_grad_()
    if top_k:
        logprobs = common.log_softmax(common.rows(teacher).logits(theirs) / 0.7)
        likeliest, ids = common.topk(logprobs, top_k)
        rest = common.logsumexp(common.put(logprobs, ids, -torch.inf))
        classes = Top(ids, torch.cat([likeliest, rest], dim=1), common)
    else:
        classes = Whole(theirs, common.rows(teacher), 0.7, common)
    values, reverse, agreement = term_divergence(
        hidden, own, classes, beta=beta, temperature=0.7, logits_bytes=6 * 4 * VOCABULARY * 5
    )
    (torch.linspace(-1, 2, TERMS, dtype=torch.float64) * values).sum().backward()
    names = ("hidden", "weight", "bias")
    gradients = {name: leaf.grad.numpy() for name, leaf in zip(names, leaves, strict=True)}
    return {"values": values.detach().numpy(), "reverse": reverse.numpy(), "agreement": agreement.numpy(), **gradients}


@pytest.mark.parametrize(
    ("beta", "top_k", "softcap"),
    [
        (0.3, 0, 3.0),
        (0.3, 4, None),
        pytest.param(1.0, 0, None, marks=pytest.mark.ci),
        pytest.param(0.0, 4, 3.0, marks=pytest.mark.ci),
    ],
)
def test_a_vocabulary_over_ranks_gives_the_same(beta, top_k, softcap):
    hidden, (head, teacher), theirs = random(4, TERMS, HIDDEN), heads(softcap), random(5, TERMS, TEACHERS)
    leaves = (hidden, head.weight, head.bias)
    for leaf in leaves:
        leaf.requires_grad_()
    classes = classes_of(theirs, teacher, top_k=top_k)
    values, reverse, agreement = term_divergence(
        hidden, head, classes, beta=beta, temperature=0.7, logits_bytes=6 * 4 * VOCABULARY * 100
    )
    (torch.linspace(-1, 2, TERMS, dtype=torch.float64) * values).sum().backward()
    ranks = run_ranks(sharded, 2, beta=beta, top_k=top_k, softcap=softcap)
    wanted = {"values": values.detach(), "reverse": reverse, "agreement": agreement}
    for name, expected in wanted.items():
        for found in ranks:
            np.testing.assert_allclose(found[name], expected.numpy(), rtol=1e-9, atol=1e-9, err_msg=name)
    gradients = {
        "hidden": sum(found["hidden"] for found in ranks),
        "weight": np.concatenate([found["weight"] for found in ranks]),
        "bias": np.concatenate([found["bias"] for found in ranks]),
    }
    for (name, found), leaf in zip(gradients.items(), leaves, strict=True):
        np.testing.assert_allclose(found, leaf.grad.numpy(), rtol=1e-9, atol=1e-9, err_msg=name)


def tiny(**changes):
    return make_model({**FAMILIES["qwen3"], "num_hidden_layers": 2, **changes}, dtype=torch.float32, seed=0)


def taught_policy(section, setup=None, *, sees=False):
    """A policy, and its teacher: wider, deeper, with another head and more rows of it; or two that see pictures."""
    frozen = None if setup is None else replace(setup, frozen=True)
    own = make_tiny("qwen3_vl") if sees else tiny()
    other = (
        make_tiny("qwen3_vl", num_layers=3)
        if sees
        else tiny(hidden_size=96, num_hidden_layers=3, tie_word_embeddings=False, vocab_size=64)
    )
    options = TermOptions(temperature=0.8, vision=vision_of(own) if sees else None)
    kind = PipelinedPolicy if setup is not None and setup.parallel.pp > 1 else CausalLMPolicy
    policy = kind(own, options, setup=setup)
    teacher = LLMTeacher(kind(other, options, setup=frozen), policy, section)
    teacher.module.requires_grad_(False)
    return policy, teacher


def with_teacher(batch, teacher):
    taught = [replace(m, terms=replace(m.terms, teacher=teacher.forward(m))) for m in batch.microbatches]
    return replace(batch, microbatches=tuple(taught))


def learn(section, *, share, mesh=None, parallel=None, steps=3, sees=False):
    """Losses, metrics and weights of a few steps."""
    setup = None if mesh is None else ModelSetup(mesh=mesh, parallel=parallel)
    policy, teacher = taught_policy(section, setup, sees=sees)
    task = build_objective(AlgorithmConfig(name="grpo"), max_terms=32)
    trainer = Trainer(
        policy,
        objective=TaughtObjective(task, section),
        optimizer=build_optimizer(
            "adamw", policy.module, learning_rate=1e-2, betas=(0.9, 0.99), eps=1e-2, weight_decay=0.0
        ),
        lr_factor=lambda _: 1.0,
        max_grad_norm=1.0,
        mesh=mesh,
    )
    lines = []
    vision = vision_of(make_tiny("qwen3_vl")) if sees else None
    for step in range(steps):
        made = make_batch(step, share=share, supervised=False, microbatch_terms=48, vision=vision)
        batch = with_teacher(made, teacher)
        trainer.begin(batch)
        trainer.forward_backward(batch.microbatches)
        lines.append(trainer.optim_step().metrics)
    weights = {name: whole(tensor) for name, tensor in policy.weights().items()}
    names = ("loss", "teacher_kl", "teacher_agreement", "grad_norm")
    return weights | {name: np.array([line[name] for line in lines]) for name in names}


def whole(tensor):
    return getattr(tensor, "full_tensor", lambda: tensor)().detach().numpy().copy()


def learn_rank(rank, world_size, *, dims, keys, sees=False):
    sizes = {name: size for name, size in dims.items() if name in AXES}
    mesh = ReplicaMesh.build(ParallelDims(**sizes), device=torch.device("cpu"))
    parallel = ParallelSection.model_validate(dims)
    return learn(
        TeacherSection(path="t", **keys),
        share=replace(mesh.share, multiple=microbatch_multiple(parallel)),
        mesh=mesh,
        parallel=parallel,
        sees=sees,
    )


JSD, TOP, ADVANTAGE = {"beta": 0.5}, {"top_k": 5}, {"loss": "advantage", "discount": 0.9}


def check_ranks(dims, keys, *, sees=False):
    """Compare with one process; the first step's numbers, before weights differ by rounding, to 1e-6."""
    expected = learn(TeacherSection(path="t", **keys), share=Share(), sees=sees)
    assert np.abs(np.diff(expected["loss"])).min() > 1e-4
    world_size = ParallelDims(**{name: size for name, size in dims.items() if name in AXES}).world_size
    ranks = run_ranks(learn_rank, world_size, dims=dims, keys=keys, sees=sees)
    for name, wanted in expected.items():
        values = [found[name] for found in ranks if name in found]
        assert values, f"no rank has {name}"
        for value in values:
            np.testing.assert_allclose(value, wanted, rtol=1e-4, atol=2e-5, err_msg=name)
            if name in ("loss", "teacher_kl", "teacher_agreement"):
                np.testing.assert_allclose(value[0], wanted[0], rtol=1e-6, atol=1e-6, err_msg=name)


@pytest.mark.parametrize(
    ("dims", "keys"),
    [
        ({"dp_shard": 2}, JSD),
        pytest.param({"dp_shard": 2}, TOP, marks=pytest.mark.ci),
        pytest.param({"dp_shard": 2}, ADVANTAGE, marks=pytest.mark.ci),
        pytest.param({"dp_shard": 2, "dp_replicate": 2}, {"beta": 0.0}, marks=pytest.mark.ci),
        *(
            pytest.param({axis: 2}, keys, marks=pytest.mark.ci)
            for axis in ("cp", "tp", "pp")
            for keys in (JSD, TOP, ADVANTAGE)
        ),
        pytest.param({"tp": 2, "sequence_parallel": True, "dp_shard": 2}, JSD, marks=pytest.mark.slow),
        pytest.param({"tp": 2, "cp": 2}, TOP, marks=pytest.mark.slow),
        pytest.param({"pp": 2, "dp_shard": 2}, JSD, marks=pytest.mark.slow),
        pytest.param({"pp": 2, "tp": 2}, JSD, marks=pytest.mark.slow),
    ],
)
def test_ranks_learn_as_one_process_does(dims, keys):
    check_ranks(dims, keys)


@pytest.mark.parametrize(
    ("dims", "keys"),
    [
        pytest.param({"dp_shard": 2}, JSD, marks=pytest.mark.ci),
        *(
            pytest.param(dims, keys, marks=pytest.mark.slow)
            for dims, keys in [
                ({"dp_shard": 2}, {"loss": "advantage"}),
                ({"cp": 2}, JSD),
                ({"tp": 2}, JSD),
                ({"pp": 2}, JSD),
            ]
        ),
    ],
)
def test_ranks_learn_from_a_teacher_that_sees_pictures(dims, keys):
    pytest.importorskip("PIL")
    check_ranks(dims, keys, sees=True)


def test_rows_longer_than_the_teachers_context_are_refused():
    check_length(100, 100, path="other")
    check_length(100, None, path="other")
    for own, rows in ((101, "rows of up to 101 tokens"), (None, "rows of any length")):
        with pytest.raises(
            UserError, match=f"'other' reads up to 100 tokens, and the model {rows}; set model.max_length = 100"
        ):
            check_length(own, 100, path="other")


def test_files_that_process_pictures_alike_agree_and_the_first_difference_is_named(tmp_path):
    pytest.importorskip("PIL")
    from tiny_vision import family_of, make

    model, families = make("qwen3_vl"), {}
    changes = {
        "model": {},
        "teacher": {"image_processor_type": "Qwen2VLImageProcessorFast", "do_rescale": True, "processor_class": "X"},
        "other": {"image_mean": [0.5, 0.5, 0.5], "do_rescale": False},
    }
    for name, change in changes.items():
        (tmp_path / name).mkdir()
        family_of(model, tmp_path / name)
        file = tmp_path / name / "preprocessor_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | change))
        families[name] = find_family(str(tmp_path / name), model.config)
    check_processing(families["model"], families["teacher"], path="t")
    with pytest.raises(UserError, match=r"do_rescale is False in the teacher's files and True in the model's"):
        check_processing(families["model"], families["other"], path="t")


def test_a_packed_batch_has_the_divergence_of_plain_transformers():
    section = TeacherSection(path="t", beta=0.5, task_coef=0.0)
    policy, teacher = taught_policy(section)
    plain = tiny(), tiny(hidden_size=96, num_hidden_layers=3, tie_word_embeddings=False, vocab_size=64)
    (microbatch, *_) = with_teacher(
        make_batch(0, share=Share(), supervised=False, microbatch_terms=200), teacher
    ).microbatches
    found = policy.forward(microbatch).tensors["teacher"]
    found.sum().backward()
    inputs, expected = microbatch.inputs, []
    for index in inputs["sequence_index"].unique():
        here = torch.nonzero(inputs["sequence_index"] == index).squeeze(1)
        places = inputs["logit_index"]
        places = places[(places >= here[0]) & (places <= here[-1])] - here[0]
        tokens = inputs["tokens"][here][None]
        logprobs = [(model(tokens).logits[0, places, :61] / 0.8).log_softmax(-1) for model in plain]
        expected.append(divergence(logprobs[0], logprobs[1].detach(), beta=0.5))
    expected = torch.cat(expected)
    expected.sum().backward()
    assert len(expected) > 50
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    gradients = {name: parameter.grad for name, parameter in plain[0].named_parameters()}
    for name, parameter in policy.module.causal_lm.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-4, atol=1e-5)


def test_a_teacher_is_no_part_of_the_policy():
    policy, teacher = taught_policy(TeacherSection(path="t"))
    held = {id(parameter) for parameter in teacher.module.parameters()}
    assert not held & {id(parameter) for parameter in policy.module.parameters()}
    assert policy.weights().keys() == CausalLMPolicy(tiny()).weights().keys()


def test_top_k_has_to_leave_a_token():
    with pytest.raises(UserError, match="top_k = 61"):
        taught_policy(TeacherSection(path="t", top_k=61))


def test_the_first_difference_of_tokenizers_is_named():
    tokens = {"a": 0, "b": 1, "c": 2}
    assert first_difference(tokens, dict(tokens)) is None
    assert (
        first_difference(tokens, {"a": 0, "c": 1, "b": 2}) == "token 1 is 'b' in the model's and 'c' in the teacher's"
    )
    with pytest.raises(UserError, match="token 2 is 'c' in the model's and missing in the teacher's"):
        check_tokens(tokens, {"a": 0, "b": 1}, path="other")

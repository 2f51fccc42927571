"""Vision-language models: packed rows and the torch engine compute what transformers computes with a sequence alone."""

import copy
import hashlib
import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from tiny_engine import TokenChat

from cosmos_rl_core import run
from cosmos_rl_core.algorithms.config import AlgorithmConfig, TeacherSection
from cosmos_rl_core.algorithms.objective import build_objective
from cosmos_rl_core.types import Prompt, RolloutGroup, Sampling, Share
from cosmos_rl_core.wire.payload import decode_group, encode_group
from cosmos_rl_llm.config import LLMTorchOptions
from cosmos_rl_llm.data.collate import TrainSequence, pack_batch
from cosmos_rl_llm.engines.prompts import StopStrings
from cosmos_rl_llm.engines.torch.batch import GenerationRequest, RunningBatch
from cosmos_rl_llm.media.item import KINDS, MediaItem, View
from cosmos_rl_llm.media.packed import add_blanks
from cosmos_rl_llm.policy.policy import CausalLMPolicy
from cosmos_rl_llm.policy.token_model import TermModel, TermOptions
from cosmos_rl_llm.teacher.teacher import LLMTeacher

pytest.importorskip("PIL")

from tiny_vision import (
    COLOURS,
    NAMES,
    WORDS,
    family_of,
    make,
    picture,
    plain_logprobs,
    prompt,
    square,
    video,
    write_processing,
)

TOLERANCE = 1e-5


@pytest.fixture(params=NAMES)
def model(request):
    return make(request.param)


@pytest.fixture
def family(model, tmp_path):
    return family_of(model, tmp_path)


@pytest.fixture
def shown(family):
    """Lists of pictures and videos: neighbours that are equal, overlap, and differ in pictures alone."""
    first, second = family.image(picture(32, 40, seed=0)), family.image(picture(20, 33, seed=1))
    other = family.image(picture(32, 40, seed=2))
    moving = family.video(video()) if "video" in family.token_ids else family.image(picture(30, 12, seed=3))
    return [[first, moving], [first, moving], [second], [], [first], [other], [second, first]]


def samples(shown, family, directory):
    random = np.random.default_rng(3)
    made = []
    for items in shown:
        tokens, view = prompt(items, family, directory)
        response = random.integers(len(WORDS), 64, random.integers(3, 8)).astype(np.int32)
        made.append(
            TrainSequence(
                prompt_tokens=tokens,
                tokens=response,
                logprobs=np.zeros(len(response), np.float32),
                loss_mask=np.ones(len(response), bool),
                advantage=1.0,
                view=view,
            )
        )
    return made


def num_pixels(row):
    """Values that the tower gets."""
    return sum(values.numel() for name, values in row.media.items() if name.startswith("pixel"))


def test_a_packed_row_equals_each_sequence_alone(model, family, shown, tmp_path):
    plain, made = copy.deepcopy(model), samples(shown, family, tmp_path)
    wanted = torch.cat([plain_logprobs(plain, family, s.prompt_tokens, s.tokens, s.view.items) for s in made])
    wanted.sum().backward()
    module = TermModel(model, TermOptions(vision=family))
    row = module.row(pack_batch(made, microbatch_terms=10_000, share=Share(), metrics={}).microbatches[0].inputs)
    found, *_ = module(None, row)
    found.sum().backward()
    torch.testing.assert_close(found, wanted, rtol=0, atol=TOLERANCE)
    gradients = dict(model.named_parameters())
    for name, parameter in plain.named_parameters():
        if parameter.grad is None:  # after the layer of the tower from which llava takes its features
            assert gradients[name].grad is None
            continue
        largest = float(parameter.grad.abs().max())  # 0 but for rounding of a key's bias
        torch.testing.assert_close(gradients[name].grad, parameter.grad, rtol=0, atol=TOLERANCE * largest + 1e-7)


def test_a_teacher_sees_the_pictures(model, family, shown, tmp_path):
    made, name = samples(shown, family, tmp_path), model.config.model_type
    plain = make(name, seed=1)
    wanted = [plain_logprobs(plain, family, s.prompt_tokens, s.tokens, s.view.items) for s in made]
    microbatch = pack_batch(made, microbatch_terms=10_000, share=Share(), metrics={}).microbatches[0]
    policy = CausalLMPolicy(model, TermOptions(vision=family))
    teacher = LLMTeacher(
        CausalLMPolicy(plain, TermOptions(vision=family)), policy, TeacherSection(path="t", loss="advantage")
    )
    torch.testing.assert_close(teacher.forward(microbatch)["logprobs"], torch.cat(wanted).detach(), rtol=0, atol=1e-5)
    for seed, distance in ((0, 0.0), (1, 0.1)):
        teacher = LLMTeacher(
            CausalLMPolicy(make(name, seed=seed), TermOptions(vision=family)), policy, TeacherSection(path="t")
        )
        terms = replace(microbatch.terms, teacher=teacher.forward(microbatch))
        found = policy.forward(replace(microbatch, terms=terms)).metrics
        assert found["teacher_kl"].mean().item() >= distance
        assert (found["teacher_kl"].abs().max() < TOLERANCE) == (distance == 0)
        assert (found["teacher_agreement"].mean() == 1) == (distance == 0)


def test_equal_prompts_are_computed_once_with_their_pictures(model, family, shown, tmp_path):
    made = samples(shown[:2], family, tmp_path)
    row = TermModel(model, TermOptions(vision=family)).row(
        pack_batch(made, microbatch_terms=10_000, share=Share(), metrics={}).microbatches[0].inputs
    )
    assert row.tokens.shape[1] == len(made[0].prompt_tokens) + sum(len(s.tokens) - 1 for s in made)
    assert num_pixels(row) == sum(item.pixels.size for item in shown[0])


def test_a_pair_with_pictures_is_its_answers_alone_and_shows_them_once(model, family, shown, tmp_path):
    plain, (chosen, rejected) = copy.deepcopy(model), samples(shown[:2], family, tmp_path)
    wanted = [plain_logprobs(plain, family, s.prompt_tokens, s.tokens, s.view.items) for s in (chosen, rejected)]
    pair = replace(chosen, preference=1.0, key=1, others=(replace(rejected, preference=-1.0, key=2),))
    (microbatch,) = pack_batch([pair], microbatch_terms=10_000, share=Share(), metrics={}).microbatches
    terms = replace(microbatch.terms, ref_sums=torch.stack([each.detach().sum() - 1.0 for each in wanted]))
    policy = CausalLMPolicy(model, TermOptions(vision=family))
    assert num_pixels(policy.module.row(microbatch.inputs)) == sum(item.pixels.size for item in shown[0])
    outputs = policy.forward(microbatch)
    torch.testing.assert_close(outputs.logprobs, torch.cat(wanted), rtol=0, atol=TOLERANCE)
    (loss,), _ = build_objective(AlgorithmConfig(name="dpo", options={"beta": 1.0}), max_terms=1)(outputs, terms)
    (loss.values / torch.bincount(terms.rollout_index)[terms.rollout_index]).sum().div(2).backward()
    (0.5 * (wanted[1].sum() - wanted[0].sum())).backward()  # -log sigmoid has the slope -1/2 at 0
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert (mine.grad is None) == (theirs.grad is None)
        if theirs.grad is not None:
            torch.testing.assert_close(mine.grad, theirs.grad, rtol=0, atol=TOLERANCE * theirs.grad.abs().max() + 1e-7)


def test_a_groups_picture_passes_the_tower_once_where_its_rollouts_fit_into_a_microbatch(family, shown, tmp_path):
    made = samples([shown[4]] * 3 + [shown[5]] * 3, family, tmp_path)
    lengths = [sample.length for sample in made]
    capacity = max(sum(lengths[:3]), sum(lengths[3:])) + min(lengths)  # room for one of the next group
    batch = pack_batch(made, groups=[0] * 3 + [1] * 3, microbatch_terms=capacity, share=Share(), metrics={})
    assert [each.inputs["item_digest"].tolist() for each in batch.microbatches] == [
        [shown[4][0].digest],
        [shown[5][0].digest],
    ]


def test_equal_texts_with_other_pictures_are_not_shared(model, family, shown, tmp_path):
    made = samples(shown[4:6], family, tmp_path)
    assert np.array_equal(made[0].prompt_tokens, made[1].prompt_tokens)
    row = TermModel(model, TermOptions(vision=family)).row(
        pack_batch(made, microbatch_terms=10_000, share=Share(), metrics={}).microbatches[0].inputs
    )
    assert num_pixels(row) == sum(item.pixels.size for s in made for item in s.view.items)


def test_a_blank_item_changes_nothing(model, family, shown, tmp_path):
    """A rank without pictures shows one, so that it runs the tower as often as others."""
    inputs = pack_batch(samples([[]], family, tmp_path), microbatch_terms=100, share=Share(), metrics={})
    inputs = inputs.microbatches[0].inputs
    module = TermModel(model, TermOptions(vision=family))
    wanted, *_ = module(None, module.row(inputs))
    for kind in family.token_ids:
        blank = add_blanks({**inputs, "batch_kinds": torch.tensor([KINDS.index(kind)])}, family, always=False)
        row = module.row(blank)
        assert num_pixels(row) == family.blank(kind).pixels.size
        torch.testing.assert_close(module(None, row)[0], wanted, rtol=0, atol=TOLERANCE)


def test_the_torch_engine_samples_with_the_log_probabilities_of_transformers(model, family, shown, tmp_path):
    plain = copy.deepcopy(model)
    with torch.no_grad():
        drawn = model.get_output_embeddings().weight
        drawn[family.token_ids["image"]] = 100 * drawn[len(WORDS)]  # a picture's placeholder, which must not be drawn
    requests = []
    for number, items in enumerate(shown):
        tokens, view = prompt(items, family, tmp_path)
        requests.append(
            GenerationRequest(
                prompt_tokens=tokens,
                num_samples=1 + number % 2,
                first_sample=0,
                sampling=Sampling(max_terms=7),
                seed=number,
                view=view,
            )
        )
    batch = RunningBatch(model, LLMTorchOptions(max_sequences=16), vision=family)
    batch.admit(requests, version=0)
    while batch.sequences:
        batch.step(version=0)
    for request in requests:
        for sequence in request.sequences:
            response = np.array(sequence.tokens)
            assert not np.isin(response, [*family.token_ids.values()]).any()
            with torch.no_grad():
                wanted = plain_logprobs(plain, family, request.prompt_tokens, response, request.view.items)
            np.testing.assert_allclose(sequence.logprobs, wanted.numpy(), rtol=0, atol=TOLERANCE)


def test_a_group_has_its_pictures_once(family, shown, tmp_path):
    tokens, view = prompt(shown[0], family, tmp_path)
    request = GenerationRequest(
        prompt_tokens=tokens,
        num_samples=8,
        first_sample=0,
        sampling=Sampling(max_terms=2),
        seed=0,
        view=view,
        stops=StopStrings(TokenChat(), ()),
    )
    for sequence in request.start():
        sequence.tokens, sequence.logprobs, sequence.versions = [8, 1], [-1.0, -1.0], [0, 0]
        sequence.finish_reason = "stop"
    rollouts = tuple(sequence.rollout() for sequence in request.sequences)
    encoded = encode_group(RolloutGroup(prompt=Prompt(sample_id=0, row={}), rollouts=rollouts))
    pixels = sum(item.pixels.nbytes for item in shown[0])
    assert pixels < len(encoded) < 2 * pixels
    found = [View.of_arrays(rollout.arrays) for rollout in decode_group(encoded).rollouts]
    assert len(found) == 8
    for each in found:
        assert [item.digest for item in each.items] == [item.digest for item in view.items]
        assert np.array_equal(each.index, view.index) and np.array_equal(each.positions, view.positions)


def test_pixels_are_hashed_once(monkeypatch):
    hashed, inner = [], hashlib.blake2b
    monkeypatch.setattr(hashlib, "blake2b", lambda data, **options: hashed.append(1) or inner(data, **options))
    item = MediaItem(kind="image", pixels=np.ones((2, 3), np.float32))
    assert item.digest == item.digest == MediaItem(kind="image", pixels=item.pixels).digest
    assert len(hashed) == 2


@pytest.fixture
def colours(tmp_path):
    """Squares with the name of their colour and a wrong one, and tables of a recipe that shows them to a tiny model."""
    base = tmp_path / "base"
    make("qwen3_vl").save_pretrained(base)
    write_processing(base)
    rows, names = [], list(COLOURS)
    for number, name in enumerate(names * 4):
        square(COLOURS[name], dark_rows=number + 1).save(tmp_path / f"{number}.png")
        row = {"prompt": "what colour ?", "picture": f"{number}.png", "response": name, "answer": name}
        rows.append({**row, "rejected": names[(number + 1 + number // 6) % 3]})
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {"path": str(tmp_path / "rows.jsonl"), "image_column": "picture", "media": {"root": str(tmp_path)}}
    common = {"model": {"path": str(base)}, "policy": {"prompts_per_step": 6, "optimizer": {"learning_rate": 3e-3}}}
    return data, common


@pytest.mark.ci
def test_a_model_learns_from_pairs_with_pictures(tmp_path, colours):
    data, common = colours
    tuned = run({
        **common,
        "run": {"domain": "llm", "max_steps": 20, "placement": "inline", "output_dir": str(tmp_path / "dpo")},
        "data": {**data, "chosen_column": "response", "rejected_column": "rejected"},
        "eval": {"held_out": 3},
        "algorithm": {"name": "dpo"},
    })  # fmt: skip
    assert tuned.metrics[0]["loss"] == pytest.approx(np.log(2), abs=1e-4)
    assert tuned.metrics[-1]["loss"] < 0.3
    assert tuned.evaluations[20]["eval/reward_accuracy"] == pytest.approx(1.0)  # answers alone say nothing


@pytest.mark.ci
def test_a_model_learns_from_pictures_and_answers_with_grpo(tmp_path, colours):
    data, common = colours
    taught = run({
        **common,
        "run": {"domain": "llm", "max_steps": 20, "placement": "inline", "output_dir": str(tmp_path / "sft")},
        "data": {**data, "response_column": "response"},
        "algorithm": {"name": "sft"},
    })  # fmt: skip
    assert taught.metrics[-1]["loss"] < 0.2 * taught.metrics[0]["loss"]
    drawn = run({
        **common,
        "run": {"domain": "llm", "max_steps": 3, "placement": "inline", "output_dir": str(tmp_path / "grpo")},
        "model": {"path": str(taught.checkpoint / "policy")},
        "data": {**data, "answer_column": "answer"},
        "algorithm": {"name": "grpo"},
        "rollout": {"group_size": 4, "sampling": {"max_tokens": 3}},
        "reward": {"functions": [{"name": "exact"}]},
    })  # fmt: skip
    assert drawn.metrics[0]["reward_mean"] > 0.6  # of three colours
    (index,) = (tmp_path / "grpo/media").glob("index*.jsonl")
    kept = [json.loads(line) for line in index.read_text().splitlines()]
    assert {(line["step"], line["caption"]) for line in kept} == {(0, "what colour ?")}
    assert all((tmp_path / "grpo/media" / line["file"]).is_file() for line in kept)
    assert drawn.metrics[0]["mismatch_kl"] < 1e-6

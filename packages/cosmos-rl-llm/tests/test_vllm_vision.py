"""vLLM with pictures, on CPU, with tiny models: one engine a family, since it takes half a minute to start.

The files of vLLM for all but Idefics3 import torchvision, which the CPU's environment does not have (`towers`).
"""

import asyncio
import copy
import json

import numpy as np
import pytest
import torch
from sent_weights import sent_weights
from tiny_engine import TokenChat
from transformers import PreTrainedTokenizerFast

from cosmos_rl_core import run
from cosmos_rl_core.errors import PromptError, UserError
from cosmos_rl_core.recipe.load import load_config
from cosmos_rl_core.types import Prompt, Sampling
from cosmos_rl_core.weight_sync import SyncSection
from cosmos_rl_llm.config import MediaSection
from cosmos_rl_llm.data.chat import Encoded
from cosmos_rl_llm.domain import LLM
from cosmos_rl_llm.engines.vllm.engine import VllmEngine, input_of
from cosmos_rl_llm.engines.vllm.media import placeholders
from cosmos_rl_llm.engines.vllm.options import PICTURES, VllmEngineOptions
from cosmos_rl_llm.engines.vllm.start import start
from cosmos_rl_llm.media.item import MediaItem, View
from cosmos_rl_llm.media.vision import Vision
from cosmos_rl_llm.model.vision_parts import freeze

psutil = pytest.importorskip("psutil", reason="comes with vLLM")
pytest.importorskip("PIL")
pytest.importorskip("vllm", reason="the extra cosmos-rl-llm[vllm] is not installed")

from tiny_vision import (  # noqa: E402  it needs Pillow
    NAMES,
    WORDS,
    family_of,
    make,
    picture,
    plain_logits,
    plain_logprobs,
    prompt,
    video,
    write_processing,
)

pytestmark = [
    pytest.mark.ci,
    pytest.mark.xdist_group("vllm"),
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings(  # vLLM's own
        "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore:Unclosed context:ResourceWarning"
    ),
]

TOLERANCE = 1e-5
SETTINGS = SyncSection(timeout_s=60.0)
SYNCS = 10


@pytest.fixture(
    scope="module",
    params=["idefics3", *(pytest.param(name, marks=pytest.mark.slow) for name in PICTURES if name != "idefics3")],
)
def name(request):
    return request.param


def tiny(name):
    """A model that would draw the placeholder of pictures at almost every place."""
    model = make(name, wide=True)
    with torch.no_grad():
        head = model.get_output_embeddings().weight
        head[model.config.image_token_id] = 100 * head[len(WORDS)]
    return model


@pytest.fixture(scope="module")
def runner():
    """One event loop for all tests: vLLM stays in the one it was first used in."""
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module")
def directory(tmp_path_factory, name):
    directory = tmp_path_factory.mktemp("tiny")
    tiny(name).save_pretrained(directory)
    write_processing(directory, name)
    return directory


@pytest.fixture(scope="module")
def llm(runner, directory):
    options = VllmEngineOptions(cache_bytes=64 << 20, extra={"block_size": 32})
    llm = start(str(directory), options=options, dtype="float32", max_length=None, pictures=True)
    yield llm
    runner.run(asyncio.to_thread(llm.shutdown))
    llm.engine_core.resources.ctx.destroy(linger=0)  # vLLM leaves that to the garbage collector, which warns


@pytest.fixture
def family(directory, name):
    return family_of(make(name), directory)


@pytest.fixture
def prompts(family, directory):
    """Encoded prompts: of one text with different pictures, of several pictures, of text, and of videos."""
    first, second, other = (
        family.image(picture(*size, seed=seed)) for seed, size in enumerate([(32, 40), (12, 30), (32, 40)])
    )
    shown = [[first], [other], [second, first], [first, first], []]
    if "video" in family.token_ids:
        film = family.video(video(frames=6))
        shown += [[film], [film, first], [family.video(video(frames=6, seed=1))]]
    made = [prompt(items, family, directory) for items in shown]
    return [Encoded(text="", tokens=tokens, view=view) for tokens, view in made]


def engine_of(llm, family, encoded, **options):
    vision = None if family is None else Vision(family=family, limits=MediaSection())
    chat = TokenChat(encoded=lambda row: encoded[row["number"]], vision=vision)
    return VllmEngine(llm, chat, version=0, **options)


async def draw(engine, number, *, num_samples=2, **sampling):
    given = Prompt(sample_id=number, row={"number": number}, origin=f"rows:{number}")
    sampling = Sampling(**{"max_terms": 12, **sampling})
    return (await engine.generate(given, num_samples=num_samples, sampling=sampling, seed=5))[1]


@torch.no_grad()
def check(rollouts, model, family):
    """Compare log-probabilities with those of transformers; return the drawn tokens of each."""
    for rollout in rollouts:
        view = View.of_arrays(rollout.arrays)
        wanted = plain_logprobs(model, family, rollout.arrays["prompt_tokens"], rollout.arrays["tokens"], view.items)
        np.testing.assert_allclose(rollout.rollout_logprobs, wanted.numpy(), rtol=0, atol=TOLERANCE)
    return [rollout.arrays["tokens"].tolist() for rollout in rollouts]


def shown_at(span):
    """Places of the tokens that show an item."""
    return (span.offset + np.flatnonzero(np.ones(span.length) if span.is_embed is None else span.is_embed)).tolist()


def test_its_own_processor_makes_the_same_tokens_and_tensors_of_a_picture(llm, family, directory, name):
    if name != "idefics3":
        pytest.skip(f"vLLM's processor of {name} needs torchvision")
    shown = [picture(32, 40, seed=0), picture(12, 30, seed=1)]
    items = [family.image(each) for each in shown]
    tokens, view = prompt(items, family, directory)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(directory)
    text = "<user> <|vision_start|><image><|vision_end|> <|vision_start|><image><|vision_end|> what colour ? <bot> "
    (wanted,) = llm.renderer.render_cmpl(
        [{"prompt_token_ids": tokenizer(text)["input_ids"], "multi_modal_data": {"image": shown}}]
    )
    engine = engine_of(llm, family, [])
    found = input_of(Encoded(text="", tokens=tokens, view=view), salt=0, media=engine._media)
    assert found["prompt_token_ids"] == wanted["prompt_token_ids"]
    assert [shown_at(each) for each in found["mm_placeholders"]["image"]] == [
        shown_at(each) for each in wanted["mm_placeholders"]["image"]
    ]
    for ours, theirs in zip(found["mm_kwargs"]["image"], wanted["mm_kwargs"]["image"], strict=True):
        assert ours.keys() == theirs.keys()
        for name, value in ours.get_data().items():
            torch.testing.assert_close(value, theirs.get_data()[name], rtol=0, atol=0)


def test_log_probabilities_are_those_of_transformers(llm, runner, family, prompts, name):
    """Also after prompts of equal text with other pictures, whose keys and values are cached."""
    model, engine = tiny(name), engine_of(llm, family, prompts)
    for _ in range(2):
        for number in range(len(prompts)):
            drawn = check(runner.run(draw(engine, number)), model, family)
            assert not np.isin(drawn, [*family.token_ids.values()]).any()


def test_a_groups_pictures_are_put_into_requests_once(llm, runner, family, prompts, name):
    engine, made = engine_of(llm, family, prompts), []
    inner = engine._media.prompt
    engine._media.prompt = lambda *args, **options: made.append(args) or inner(*args, **options)
    check(runner.run(draw(engine, 0, num_samples=3)), tiny(name), family)
    assert len(made) == 1


def test_a_picture_of_more_tokens_than_vllm_keeps_is_an_error_of_its_row(llm, runner, family, prompts, monkeypatch):
    size = family.num_tokens(prompts[0].view.items[0])
    monkeypatch.setattr(llm.input_processor, "mm_encoder_cache_size", size - 1)
    reason = f"rows:0: a picture or video of {size} tokens, and vLLM takes up to {size - 1}; raise max_num"
    with pytest.raises(PromptError, match=reason):
        runner.run(draw(engine_of(llm, family, prompts), 0))


def test_it_takes_no_other_familys_pictures(tmp_path):
    for name in set(NAMES) - set(PICTURES):
        make(name).save_pretrained(tmp_path / name)
        with pytest.raises(UserError, match=rf"and not of {name} \(vLLM's .*; set it to"):
            model = LLM.Model(path=str(tmp_path / name))
            LLM.build_engine(model, data=LLM.Data(path="x"), name="vllm", options={})
        config = load_config({
            "run": {"domain": "llm", "max_steps": 1},
            "model": {"path": str(tmp_path / name)},
            "data": {"path": "x"},
            "algorithm": {"name": "grpo"},
            "rollout": {"engine": "vllm", "sampling": {"max_tokens": 4}},
            "reward": {"functions": [{"name": "math"}]},
        })  # fmt: skip
        problems = [problem.wrong for problem in LLM.problems(config, [], []) if problem.key == "rollout.engine"]
        assert len(problems) == 1 and f"not of {name} (vLLM's" in problems[0]


def test_placeholders_span_what_lies_between_the_tokens_of_an_item():
    items = tuple(MediaItem(kind=kind, pixels=np.zeros((1, 1), np.float32)) for kind in ("video", "image"))
    view = View(items=items, index=np.array([-1, 0, 0, -1, 0, -1, 1, 1]))
    first, second = placeholders(view)
    assert (first.offset, first.length, first.is_embed.tolist()) == (1, 4, [True, True, False, True])
    assert (second.offset, second.length, second.is_embed) == (6, 2, None)
    first, second = placeholders(view, leads=1)
    assert (first.offset, first.length, first.is_embed.tolist()) == (0, 5, [False, True, True, False, True])
    assert (second.offset, second.length) == (6, 2)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "frozen"), [("idefics3", []), ("qwen3_vl", []), ("qwen3_vl", ["tower", "projector"])])
def test_a_run_with_pictures(tmp_path, kind, frozen):
    base = tmp_path / "base"
    make(kind, wide=True).save_pretrained(base)
    write_processing(base, kind)
    for number in range(4):
        picture(24, 32, seed=number).save(tmp_path / f"{number}.png")
    rows = [{"prompt": "what colour ?", "picture": f"{number}.png", "answer": "red"} for number in range(4)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    metrics = run({
        "run": {"domain": "llm", "output_dir": str(tmp_path / "run"), "max_steps": 3},
        "model": {"path": str(base), "freeze": frozen},
        "data": {
            "path": str(tmp_path / "rows.jsonl"),
            "image_column": "picture",
            "answer_column": "answer",
            "media": {"root": str(tmp_path)},
        },
        "algorithm": {"name": "grpo"},
        "policy": {"prompts_per_step": 4, "threads": 1, "optimizer": {"learning_rate": 1e-3}},
        "rollout": {
            "engine": "vllm",
            "group_size": 4,
            "threads": 1,
            "sampling": {"max_tokens": 4},
            "options": {"cache_bytes": 64 << 20},
        },
        "reward": {"functions": [{"name": "length", "options": {"max_tokens": 1, "slack_tokens": 3}}]},
        "sync": {"max_staleness": 0},
        "logging": {"sinks": ["jsonl"]},
    }).metrics  # fmt: skip
    assert len(metrics) == 3
    assert all(line["mismatch_kl"] < 1e-5 for line in metrics)  # drawn with the weights that are trained


def test_frozen_parts_stay_as_they_were_loaded(llm, runner, family, prompts, name):
    """Nothing of tower and projector is sent; the weights of the language model arrive."""
    model, engine = copy.deepcopy(tiny(name)), engine_of(llm, family, prompts)
    freeze(model, ["tower", "projector"])

    async def work():
        async with sent_weights(engine, model, SETTINGS) as send:
            for version in (101, 102):  # vLLM keeps outputs of the tower by version, for the tests after this one too
                generator = torch.Generator().manual_seed(version)
                with torch.no_grad():
                    for parameter in (each for each in model.parameters() if each.requires_grad):
                        parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.01)
                await send(version)
                check(await draw(engine, 2, num_samples=1), model, family)

    runner.run(work())


def test_weights_of_the_tower_arrive_and_its_cached_outputs_do_not_stay(llm, runner, family, prompts, name):
    """Ten versions, in each of which every weight differs; the same picture is shown in all."""
    model, engine = copy.deepcopy(tiny(name)), engine_of(llm, family, prompts)

    async def work():
        async with sent_weights(engine, model, SETTINGS) as send:
            for version in range(1, SYNCS + 1):
                generator = torch.Generator().manual_seed(version)
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.01)
                await send(version)
                check(await draw(engine, 0, num_samples=1), model, family)
            return [(await draw(engine, number, num_samples=1, temperature=0.0))[0] for number in range(len(prompts))]

    for rollout in runner.run(work()):
        assert (rollout.versions == SYNCS).all()
        check([rollout], model, family)
        assert rollout.arrays["tokens"].tolist() == greedy(model, family, rollout)


@torch.no_grad()
def greedy(model, family, rollout):
    """The likeliest token at each place after the drawn ones before it, by transformers."""
    items = View.of_arrays(rollout.arrays).items
    logits = plain_logits(model, family, rollout.arrays["prompt_tokens"], rollout.arrays["tokens"], items)
    return logits.argmax(-1).tolist()

"""Real clips as training sees them."""

import json
import logging
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import save
from safetensors.torch import load_file, save_file
from wfm_fixtures import lines_of, mock_data, pixel_model, recipe, save_pipeline

from cosmos_rl_core import run
from cosmos_rl_core.errors import UserError
from cosmos_rl_core.observe.gallery import write_video
from cosmos_rl_core.parallel.setup import ModelSetup
from cosmos_rl_core.types import Prompt, Share
from cosmos_rl_wfm.build import build_policy
from cosmos_rl_wfm.data.config import SizeSection
from cosmos_rl_wfm.data.rows import load_rows
from cosmos_rl_wfm.domain import WFM
from cosmos_rl_wfm.models.config import WFMModelConfig


def policy_of(data, model=None):
    return build_policy(model or pixel_model(), data=data, sampling=None, seed=0, setup=ModelSetup())


def prompts_of(data, first=0):
    rows, origin = load_rows(data)
    return [Prompt(sample_id=first + i, row=row, origin=f"{origin}:{i}") for i, row in enumerate(rows)]


def collated(data, *, prompts=None, policy=None, share=None, microbatch_terms=64):
    return WFM.collate_sft(
        prompts_of(data) if prompts is None else prompts,
        data=data,
        policy=policy or policy_of(data),
        microbatch_terms=microbatch_terms,
        share=share or Share(),
    )


@pytest.fixture
def folder(tmp_path):
    """Three clips, the second of which is no video."""
    rng = np.random.default_rng(0)
    for i in range(3):
        (tmp_path / "metas").mkdir(exist_ok=True)
        (tmp_path / "videos").mkdir(exist_ok=True)
        (tmp_path / "metas" / f"clip{i}.txt").write_text("a disc moving up")
        write_video(tmp_path / "videos" / f"clip{i}.mp4", rng.integers(0, 255, (6, 16, 16, 3), np.uint8), fps=8)
    (tmp_path / "videos" / "clip1.mp4").write_bytes(b"not a video")
    return mock_data(kind="folder", path=str(tmp_path), mock={})


def test_a_clip_that_cannot_be_decoded_is_named_counted_and_trains_nothing(folder, caplog):
    with caplog.at_level(logging.WARNING):
        batch = collated(folder)
    assert (batch.num_terms, batch.metrics["rows_dropped"]) == (2, 1.0)
    (microbatch,) = batch.microbatches
    assert microbatch.terms.loss_mask.tolist() == [1.0, 0.0, 1.0]
    assert "clip1.mp4" in caplog.text
    assert len(batch.rows_dropped) == 1 and "clip1.mp4: cannot be decoded" in batch.rows_dropped[0]


def test_a_step_without_a_single_clip_trains_nothing_and_the_run_goes_on(folder):
    policy = policy_of(folder)
    batch = collated(folder, prompts=prompts_of(folder)[1:2], policy=policy)
    assert (batch.num_terms, batch.metrics["rows_dropped"]) == (0, 1.0)
    (microbatch,) = batch.microbatches
    assert policy.forward(microbatch).logprobs.isfinite().all()
    assert microbatch.terms.loss_mask.tolist() == [0.0]


def test_rows_that_are_mostly_bad_are_an_error(folder):
    with pytest.raises(UserError, match=r"9 of 9 rows so far give no clip .*clip1\.mp4"):
        collated(folder, prompts=prompts_of(folder)[1:2] * 9)


@pytest.mark.parametrize("count", [2, 3, 4])
@pytest.mark.parametrize("multiple", [1, 2])
def test_ranks_make_as_many_passes_whatever_is_wrong_with_their_clips(folder, count, multiple):
    policy, prompts = policy_of(folder), prompts_of(folder) * 3
    batches = [
        collated(
            folder,
            prompts=prompts,
            policy=policy,
            share=Share(index=index, count=count, multiple=multiple),
            microbatch_terms=2,
        )
        for index in range(count)
    ]
    assert len({len(batch.microbatches) for batch in batches}) == 1
    assert {batch.num_terms for batch in batches} == {6}
    assert sum(float(each.terms.loss_mask.sum()) for batch in batches for each in batch.microbatches) == 6


def test_ranks_pass_clips_of_the_same_shape_at_the_same_time():
    data = mock_data(buckets=("8x8", "8x16"), mock={"rows": 7})
    policy = policy_of(data)
    batches = [
        collated(data, policy=policy, share=Share(index=index, count=3), microbatch_terms=1) for index in range(3)
    ]
    shapes = {tuple(each.inputs["clean"].shape[1:] for each in batch.microbatches) for batch in batches}
    assert len(shapes) == 1


def test_random_choices_follow_from_the_place_in_the_stream():
    data = mock_data()
    policy = policy_of(data)
    (one,), (same,), (other,) = (
        collated(data, prompts=prompts_of(data, first=first), policy=policy).microbatches for first in (0, 0, 100)
    )
    assert torch.equal(one.inputs["noise"], same.inputs["noise"])
    assert torch.equal(one.inputs["times"], same.inputs["times"])
    assert not torch.equal(one.inputs["times"], other.inputs["times"])


def test_rows_of_another_section_are_cut_and_noised_as_it_says():
    data = mock_data()
    policy = policy_of(data)
    data_term = mock_data(size={"frames": 2, "height": 8, "width": 16}, noise={"weighting": "edm"})
    (own,), (other,) = (collated(section, policy=policy).microbatches for section in (data, data_term))
    assert own.inputs["clean"].shape[2:] == (4, 8, 8)
    assert other.inputs["clean"].shape[2:] == (2, 8, 16)
    assert (own.inputs["weights"] == 1).all()
    assert not (other.inputs["weights"] == 1).any()


def test_the_log_probability_is_minus_the_weighted_flow_matching_loss():
    data = mock_data(noise={"weighting": "edm"})
    policy = policy_of(data)
    (microbatch,) = collated(data, policy=policy).microbatches
    times = microbatch.inputs["times"]
    torch.testing.assert_close(microbatch.inputs["weights"], times.square() + (1 - times).square())
    plain = {name: tensor for name, tensor in microbatch.inputs.items() if name != "weights"}
    unweighted = policy.forward(type(microbatch)(inputs=plain, terms=microbatch.terms)).logprobs
    weighted = policy.forward(microbatch).logprobs
    torch.testing.assert_close(weighted, microbatch.inputs["weights"] * unweighted)


def tiny_wan(**keys):
    given = {"family": "wan", "tiny": True, "text": {"encoder": "words", "length": 4}}
    return WFMModelConfig.model_validate(given | keys)


def kept_in(folder):
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*.safetensors")}


def latents_data(folder, **keys):
    size = {"frames": 5, "height": 32, "width": 32}
    return mock_data(**{"start": "first", "size": size, "cache_path": str(folder), "mock": {"rows": 2}, **keys})


def test_latents_of_clips_that_begin_at_the_same_frame_are_computed_once(tmp_path):
    data = latents_data(tmp_path)
    (first,) = collated(data, policy=policy_of(data, tiny_wan())).microbatches
    kept = kept_in(tmp_path)
    for path in kept:
        save_file({"latents": torch.full_like(load_file(path)["latents"], 7.0)}, path)
    (again,) = collated(data, policy=policy_of(data, tiny_wan())).microbatches
    assert len(kept) == 2
    assert not (first.inputs["clean"] == 7).any()
    assert (again.inputs["clean"] == 7).all()
    assert all(torch.equal(first.inputs[name], again.inputs[name]) for name in ("times", "noise", "text"))


def test_a_rank_encodes_the_clips_of_its_share_alone(tmp_path):
    data = latents_data(tmp_path, mock={"rows": 4})
    policy = policy_of(data, tiny_wan())
    for index, kept in ((0, 2), (1, 4)):
        batch = collated(data, policy=policy, share=Share(index=index, count=2))
        assert (batch.num_terms, len(kept_in(tmp_path))) == (4, kept)


def test_latents_of_another_autoencoder_are_not_taken(tmp_path):
    data = latents_data(tmp_path)
    for seed in (0, 1):
        collated(data, policy=policy_of(data, tiny_wan(seed=seed)))
    assert len(kept_in(tmp_path)) == 4


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pipeline")
    save_pipeline(folder)
    return folder


@pytest.mark.parametrize("changed", ["config", "weights", "nothing"])
def test_latents_of_an_autoencoder_that_changed_in_its_folder_are_not_taken(pipeline, tmp_path, changed):
    root = shutil.copytree(pipeline, tmp_path / "model")
    data = latents_data(tmp_path / "cache")
    model = WFMModelConfig.model_validate({"path": str(root), "text": {"encoder": "words", "length": 4}})
    (before,) = collated(data, policy=policy_of(data, model)).microbatches
    if changed == "config":
        file = root / "vae" / "config.json"
        config = json.loads(file.read_text())
        file.write_text(json.dumps({**config, "latents_std": [2 * std for std in config["latents_std"]]}))
    if changed == "weights":  # of the same size and age
        file = root / "vae" / "diffusion_pytorch_model.safetensors"
        old = file.stat()
        save_file({name: 1.5 * weight for name, weight in load_file(file).items()}, file, metadata={"format": "pt"})
        assert file.stat().st_size == old.st_size
        os.utime(file, ns=(old.st_atime_ns, old.st_mtime_ns))
    (after,) = collated(data, policy=policy_of(data, model)).microbatches
    assert torch.equal(before.inputs["clean"], after.inputs["clean"]) == (changed == "nothing")
    assert len(kept_in(tmp_path / "cache")) == (2 if changed == "nothing" else 4)


def test_given_frames_are_decoded_where_latents_are_kept_too(tmp_path):
    data = latents_data(tmp_path)
    model = tiny_wan(family="cosmos", given={"min_frames": 1, "max_frames": 1})
    (first,), (again,) = (collated(data, policy=policy_of(data, model)).microbatches for _ in range(2))
    assert first.inputs["given"].abs().sum() > 0
    assert torch.equal(first.inputs["given"], again.inputs["given"])


def test_a_row_without_a_clip_has_given_frames_like_the_others(folder):
    data = folder.model_copy(update={"size": SizeSection(frames=5, height=32, width=32)})
    model = tiny_wan(family="cosmos", given={"min_frames": 1, "max_frames": 1})
    (microbatch,) = collated(data, policy=policy_of(data, model)).microbatches
    assert microbatch.inputs["given"].shape == microbatch.inputs["clean"].shape


def test_captions_are_dropped_for_guidance():
    dropped = []
    for share in (0.0, 0.9):
        (microbatch,) = collated(mock_data(caption_dropout=share)).microbatches
        dropped.append(int((microbatch.inputs["text_mask"].sum(1) == 0).sum()))
    assert dropped[0] == 0
    assert dropped[1] >= 3  # of six


def test_embeddings_beside_the_captions_are_what_is_trained_on(folder):
    embedding = np.random.default_rng(0).standard_normal((3, 16)).astype(np.float32)
    (Path(folder.path) / "text_embedding").mkdir()
    (Path(folder.path) / "text_embedding/clip0.safetensors").write_bytes(save({"embedding": embedding}))
    (microbatch,) = collated(folder, prompts=prompts_of(folder)[:1]).microbatches
    assert np.array_equal(microbatch.inputs["text"][0, :3], embedding)
    assert microbatch.inputs["text_mask"].tolist() == [[True, True, True, False]]


def test_clips_of_several_shapes_are_never_in_one_microbatch():
    data = mock_data(buckets=("8x8", "8x16"))
    policy = policy_of(data)
    batch = collated(data, policy=policy)
    shapes = {tuple(microbatch.inputs["clean"].shape[1:]) for microbatch in batch.microbatches}
    assert shapes == {(3, 4, 8, 8), (3, 4, 8, 16)}
    assert sum(len(microbatch.inputs["times"]) for microbatch in batch.microbatches) == batch.num_terms == 6
    assert all(policy.forward(microbatch).logprobs.isfinite().all() for microbatch in batch.microbatches)


def test_every_bucket_has_to_suit_the_model():
    with pytest.raises(UserError, match="4 frames of 9 x 8 does not fit the model"):
        policy_of(mock_data(buckets=("8x8", "9x8")))


def test_the_buckets_of_another_section_have_to_suit_the_model_too():
    policy = policy_of(mock_data())
    with pytest.raises(UserError, match="4 frames of 9 x 8 does not fit the model"):
        collated(mock_data(buckets=("8x8", "9x8")), policy=policy)


def test_a_data_term_has_a_section_of_its_own_and_a_run_goes_on_without_its_bad_clips(folder, tmp_path, capsys):
    clips = {"path": folder.path, "size": {"frames": 6, "height": 16, "width": 8}}
    sections = recipe(
        run={"domain": "wfm", "placement": "inline", "max_steps": 2, "output_dir": str(tmp_path / "run")},
        algorithm={"name": "ddrl"},
        data_regularization={"coef": 0.01, "rows_per_step": 3, "shuffle": False, "data": clips},
        policy={"prompts_per_step": 1},
        rollout={"group_size": 2, "sampling": {"num_steps": 2}},
    )
    run(sections, ['logging.sinks=["jsonl", "console"]'])
    steps = lines_of(tmp_path / "run/metrics.jsonl")
    assert [step["data_term/rows_dropped"] for step in steps] == [1.0, 1.0]
    (dropped,) = lines_of(tmp_path / "run/rows_dropped.jsonl")  # the same row twice, named once
    assert dropped["step"] == 0 and "clip1.mp4: cannot be decoded" in dropped["reason"]
    assert f"2; {dropped['reason']}" in " ".join(capsys.readouterr().out.split())
    assert all(step["loss_data_term"] > 0 for step in steps)

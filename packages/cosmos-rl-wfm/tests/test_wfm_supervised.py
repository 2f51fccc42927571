"""Real clips as training sees them."""

import logging

import numpy as np
import pytest
import torch

from cosmos_rl_core.errors import UserError
from cosmos_rl_core.parallel.setup import ModelSetup
from cosmos_rl_core.types import Prompt, Share
from cosmos_rl_wfm.build import build_policy
from cosmos_rl_wfm.data.rows import load_rows
from cosmos_rl_wfm.data.video import write_video
from cosmos_rl_wfm.domain import WFM
from cosmos_rl_wfm.models.config import WFMModelConfig
from cosmos_rl_wfm.testing import mock_data, pixel_model


def policy_of(data, model=None):
    return build_policy(model or pixel_model(), data=data, sampling=None, seed=0, setup=ModelSetup())


def prompts_of(data, first=0):
    rows, origin = load_rows(data)
    return [Prompt(sample_id=first + i, row=row, origin=f"{origin}:{i}") for i, row in enumerate(rows)]


def collated(policy, prompts, microbatch_terms=64):
    return WFM.collate_sft(prompts, policy=policy, microbatch_terms=microbatch_terms, share=Share())


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


def test_a_clip_that_cannot_be_decoded_is_named_left_out_and_counted(folder, caplog):
    with caplog.at_level(logging.WARNING):
        batch = collated(policy_of(folder), prompts_of(folder))
    assert (batch.num_terms, batch.metrics["rows_dropped"]) == (2, 1.0)
    assert "clip1.mp4" in caplog.text


def test_a_step_without_a_single_clip_is_an_error(folder):
    with pytest.raises(UserError, match="none of the 1 rows"):
        collated(policy_of(folder), prompts_of(folder)[1:2])


def test_what_is_drawn_follows_from_the_place_in_the_stream():
    data = mock_data()
    policy = policy_of(data)
    (one,), (same,), (other,) = (collated(policy, prompts_of(data, first=first)).microbatches for first in (0, 0, 100))
    assert torch.equal(one.inputs["noise"], same.inputs["noise"])
    assert torch.equal(one.inputs["times"], same.inputs["times"])
    assert not torch.equal(one.inputs["times"], other.inputs["times"])


def test_the_log_probability_is_minus_the_weighted_flow_matching_loss():
    data = mock_data(noise={"weighting": "edm"})
    policy = policy_of(data)
    (microbatch,) = collated(policy, prompts_of(data)).microbatches
    times = microbatch.inputs["times"]
    torch.testing.assert_close(microbatch.inputs["weights"], times.square() + (1 - times).square())
    plain = {name: tensor for name, tensor in microbatch.inputs.items() if name != "weights"}
    unweighted = policy.forward(type(microbatch)(inputs=plain, terms=microbatch.terms)).logprobs
    weighted = policy.forward(microbatch).logprobs
    torch.testing.assert_close(weighted, microbatch.inputs["weights"] * unweighted)


def test_latents_of_clips_that_begin_at_the_same_frame_are_computed_once(tmp_path):
    vae = WFMModelConfig.model_validate({"family": "wan", "tiny": True, "text": {"encoder": "words", "length": 4}})
    size = {"frames": 5, "height": 32, "width": 32}
    data = mock_data(start="first", size=size, cache_path=str(tmp_path), mock={"rows": 2})
    policy = policy_of(data, vae)
    (first,) = collated(policy, prompts_of(data)).microbatches
    kept = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.safetensors")}
    (again,) = collated(policy, prompts_of(data)).microbatches
    assert len(kept) == 2
    assert torch.equal(first.inputs["clean"], again.inputs["clean"])


def test_captions_are_dropped_for_guidance():
    data = mock_data(caption_dropout=0.9)
    (microbatch,) = collated(policy_of(data), prompts_of(data)).microbatches
    assert 0 < (microbatch.inputs["text_mask"].sum(1) == 0).sum() <= 6


def test_clips_of_several_shapes_are_never_in_one_microbatch():
    data = mock_data(buckets=("8x8", "8x16"))
    policy = policy_of(data)
    batch = collated(policy, prompts_of(data))
    shapes = {tuple(microbatch.inputs["clean"].shape[1:]) for microbatch in batch.microbatches}
    assert shapes == {(3, 4, 8, 8), (3, 4, 8, 16)}
    assert sum(len(microbatch.inputs["times"]) for microbatch in batch.microbatches) == batch.num_terms == 6
    assert all(policy.forward(microbatch).logprobs.isfinite().all() for microbatch in batch.microbatches)


def test_every_bucket_has_to_suit_the_model():
    with pytest.raises(UserError, match="9"):
        policy_of(mock_data(buckets=("8x8", "9x8")))

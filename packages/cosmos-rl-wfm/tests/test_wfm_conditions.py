"""Conditions of rows: what is cached of embedded captions, where, and under which key."""

from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from torch._subclasses.fake_tensor import FakeTensorMode
from wfm_fixtures import mock_data, prompt, tiny_model

from cosmos_rl_core.data.video import ByteCache
from cosmos_rl_core.types import Prompt
from cosmos_rl_wfm.conditions import Conditions
from cosmos_rl_wfm.data.clips import ClipReader
from cosmos_rl_wfm.models.base import Condition
from cosmos_rl_wfm.models.captions import pad_text
from cosmos_rl_wfm.models.config import GivenSection
from cosmos_rl_wfm.models.model import Traits

TOKENS, WIDTH = 64, 4096
ONE_CAPTION = TOKENS * WIDTH * 4 + TOKENS


@dataclass
class FatModel:
    """As much of a model as makes conditions, with embeddings of 1 MiB."""

    traits: ClassVar[Traits] = Traits(shift=1.0, guidance="from_unconditional", text_length=TOKENS)
    device: str = "cpu"
    asked: list[str] = field(default_factory=list)

    def encode_text(self, captions):
        self.asked += captions
        text = torch.full((1, TOKENS, WIDTH), float(len(self.asked)), device=self.device)
        return Condition(text=text, text_mask=torch.ones(1, TOKENS, dtype=torch.bool, device=self.device))

    def cached_text(self, embeddings, *, where=()):
        return pad_text(embeddings, length=TOKENS, width=embeddings[0].shape[1], where=where)


def conditions_of(model, *, max_bytes, data=None):
    captions = ByteCache[Condition](max_bytes)
    return Conditions(model, ClipReader(data or mock_data()), GivenSection(), captions=captions), captions


def test_more_captions_than_fit_take_no_more_memory_than_they_may():
    model = FatModel()
    conditions, cache = conditions_of(model, max_bytes=3 * ONE_CAPTION + 1)
    for number in range(10):
        conditions.of(prompt(caption=f"caption {number}"))
        assert cache.num_bytes == min(number + 1, 3) * ONE_CAPTION
    conditions.of(prompt(caption="caption 9"))
    assert len(model.asked) == 10, "what was used last is there"
    conditions.of(prompt(caption="caption 0"))
    assert len(model.asked) == 11, "what was not used for longest is gone"


def test_a_caption_larger_than_the_cache_is_embedded_and_pushes_nothing_out():
    model = FatModel()
    conditions, cache = conditions_of(model, max_bytes=ONE_CAPTION - 1)
    assert conditions.of(prompt(caption="large")).nbytes == ONE_CAPTION
    assert cache.num_bytes == 0


def test_captions_are_kept_in_host_memory_whatever_the_encoder_runs_on():
    with FakeTensorMode():
        conditions, _ = conditions_of(FatModel(device="cuda"), max_bytes=2 * ONE_CAPTION)
        for _ in range(2):
            condition = conditions.of(prompt())
            assert condition.text.device.type == condition.text_mask.device.type == "cpu"
        assert conditions.unconditional.text.device.type == "cpu"


def test_rows_of_one_caption_have_each_its_own_embedding(tmp_path):
    rows = []
    for name, value in (("a", 1.0), ("b", -1.0)):
        save_file({"x": np.full((2, 3), value, np.float32)}, tmp_path / f"{name}.safetensors")
        rows.append({"caption": "a robot arm moves", "text_embedding": str(tmp_path / f"{name}.safetensors")})
    rows.append({"caption": "a robot arm moves"})
    conditions, _ = conditions_of(FatModel(), max_bytes=2**30)
    for _ in range(2):
        means = [conditions.of(Prompt(sample_id=0, row=row)).text[0, 0].mean().item() for row in rows]
        assert means == [1.0, -1.0, 1.0]  # the encoder's first answer is 1
        assert conditions.of(Prompt(sample_id=0, row=rows[2])).text.shape[2] == WIDTH


def test_sections_that_share_a_cache_read_their_own_embeddings():
    cache = ByteCache[Condition](2**30)
    sizes = {}
    for tokens in (2, 3):
        data = mock_data(mock={"rows": 1, "embedding_tokens": tokens, "embedding_width": 8})
        conditions = Conditions(FatModel(), ClipReader(data), GivenSection(), captions=cache)
        row = {"caption": "a square", "text_embedding": "mock:0"}
        sizes[tokens] = int(conditions.of(Prompt(sample_id=0, row=row)).text_mask.sum())
    assert sizes == {2: 2, 3: 3}


@pytest.mark.parametrize(("given", "expected"), [(None, ""), ("blurred", "blurred")])
def test_guidance_leads_away_from_the_negative_prompt(given, expected):
    model = tiny_model(text={"encoder": "words", "negative_prompt": given})
    conditions, _ = conditions_of(model, max_bytes=2**30)
    assert torch.equal(conditions.unconditional.text, model.encode_text([expected]).text)

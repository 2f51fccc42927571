"""Tower and projector trained in full beside adapters, in vLLM on CPU: it answers as transformers with peft."""

import asyncio

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from tiny_engine import TokenChat

from cosmos_rl_core.parallel.lora import ranks_of
from cosmos_rl_core.parallel.setup import ModelSetup
from cosmos_rl_core.types import Prompt, Sampling
from cosmos_rl_core.weight_sync import SyncSection
from cosmos_rl_llm.config import LLMDataConfig, LLMModelConfig, MediaSection
from cosmos_rl_llm.data.chat import Encoded
from cosmos_rl_llm.domain import LLM
from cosmos_rl_llm.engines.vllm.engine import VllmEngine
from cosmos_rl_llm.engines.vllm.options import VllmEngineOptions
from cosmos_rl_llm.engines.vllm.start import start
from cosmos_rl_llm.media.item import View
from cosmos_rl_llm.media.vision import Vision
from cosmos_rl_llm.model.causal_lm import load_model
from cosmos_rl_llm.model.vision_parts import part_of
from cosmos_rl_transfer.publish.publisher import Publisher

peft = pytest.importorskip("peft", reason="the extra cosmos-rl-llm[lora] is not installed")
pytest.importorskip("psutil", reason="comes with vLLM")
pytest.importorskip("PIL")
pytest.importorskip("vllm", reason="the extra cosmos-rl-llm[vllm] is not installed")

from tiny_vision import WORDS, family_of, make, picture, plain_logits, prompt, write_processing  # noqa: E402

pytestmark = [
    pytest.mark.ci,
    pytest.mark.xdist_group("vllm"),
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings(  # vLLM's own
        "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore:Unclosed context:ResourceWarning"
    ),
]

TOKEN = b"the secret of the test"
FAMILY = "idefics3"
SYNCS = 10
SIZES = [(32, 40), (12, 30), (24, 24)]
"""Height and width of the pictures."""
GREEDY = Sampling(max_terms=12, temperature=0.0)


@torch.no_grad()
def train_to(policy, version):
    """Change adapters, tower and projector, as steps do."""
    generator = torch.Generator().manual_seed(version)
    for name, tensor in policy.weights().items():
        change = torch.empty(tensor.shape).normal_(0.0, 0.15, generator=generator)
        tensor.copy_(change) if ".lora_" in name else tensor.add_(0.1 * change)


async def answers(policy, base, encoded, vision, *, slots):
    """Return vLLM's greedy answers after `SYNCS` versions, all of which it answers with. slots: ranks by layer."""
    options = VllmEngineOptions(cache_bytes=64 << 20, extra={"block_size": 32})
    llm = await asyncio.to_thread(
        start, str(base), options=options, dtype="float32", max_length=None, pictures=True, adapters=slots
    )
    chat = TokenChat(encoded=lambda row: encoded[row["number"]], vision=vision)
    engine = VllmEngine(llm, chat, adapters=tuple(slots))
    publisher = Publisher(policy.rollout_weights(), token=TOKEN)
    subscriber = await engine.subscriber(publisher.address, settings=SyncSection(timeout_s=60.0), token=TOKEN)
    prompts = [Prompt(sample_id=i, row={"number": i}) for i in range(len(encoded))]
    try:
        for version in range(1, SYNCS + 1):
            train_to(policy, version)
            policy.before_publish()
            await publisher.publish(version, policy.rollout_weights())
            assert await subscriber.stage(after=version - 1) == version
            await engine.switch(version, subscriber.apply)
            await publisher.fence()
            groups = [await engine.generate(each, num_samples=1, sampling=GREEDY, seed=0) for each in prompts]
        return [rollouts[0] for _, rollouts in groups]
    finally:
        await subscriber.close()
        await publisher.close()
        await engine.close()
        llm.engine_core.resources.ctx.destroy(linger=0)  # vLLM leaves that to the garbage collector, which warns


@pytest.mark.parametrize("sent", ["scaled", "merged"])
def test_after_ten_syncs_its_greedy_answers_to_pictures_are_those_of_transformers_with_peft(tmp_path, sent):
    base, adapters = tmp_path / "base", tmp_path / "adapters"
    model = make(FAMILY, wide=True)
    with torch.no_grad():  # it would draw the placeholder of pictures at almost every place
        head = model.get_output_embeddings().weight
        head[model.config.image_token_id] = 100 * head[len(WORDS)]
    model.save_pretrained(base)
    write_processing(base, FAMILY)
    lora = {"rank": 4, "alpha": 6.0, "whole": ["tower", "projector"]}
    section = LLMModelConfig(path=str(base), lora=lora)
    data = LLMDataConfig(path="unused.jsonl", image_column="picture", media={"root": str(tmp_path)})
    setup = ModelSetup(sent_adapters=sent)
    policy = LLM.build_policy(section, data=data, sampling=GREEDY, seed=0, setup=setup)
    assert {part_of(name) for name in policy.weights()} == {"tower", "projector", "language_model"}
    family = family_of(model, base)
    items = [family.image(picture(*size, seed=seed)) for seed, size in enumerate(SIZES)]
    made = [prompt([item], family, base) for item in items]
    encoded = [Encoded(text="", tokens=tokens, view=view) for tokens, view in made]
    slots, vision = ranks_of(policy.module) if sent == "scaled" else {}, Vision(family=family, limits=MediaSection())
    found = asyncio.run(answers(policy, base, encoded, vision, slots=slots))
    policy.save_config(adapters)
    weights = {name: tensor.contiguous() for name, tensor in policy.weights().items()}
    save_file(weights, adapters / "adapter_model.safetensors")
    by_peft = peft.PeftModel.from_pretrained(load_model(base, dtype=torch.float32), adapters).merge_and_unload()

    @torch.no_grad()
    def likeliest(rollout):
        tokens, response = rollout.arrays["prompt_tokens"], rollout.arrays["tokens"]
        shown = View.of_arrays(rollout.arrays).items
        return plain_logits(by_peft, family, tokens, response, shown).argmax(-1).tolist()

    assert [rollout.arrays["tokens"].tolist() for rollout in found] == [likeliest(rollout) for rollout in found]
    assert all(np.all(rollout.versions == SYNCS) for rollout in found)
    assert len({tuple(rollout.arrays["tokens"]) for rollout in found}) > 1

"""The transformers models of the rewards: CLIP encoder and VLM judge. Imports torch and transformers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers import AutoImageProcessor, AutoModel, AutoModelForImageTextToText, AutoProcessor, AutoTokenizer

from cosmos_rl_core.errors import UserError
from cosmos_rl_wfm.rewards.pretrained import Pretrained


class ClipEncoder:
    """A model with `get_image_features` and `get_text_features`; vectors have length 1."""

    def __init__(self, options: Pretrained) -> None:
        dtype = getattr(torch, options.dtype)
        model: Any = options.load(lambda source: AutoModel.from_pretrained(source, dtype=dtype))
        if not callable(getattr(model, "get_text_features", None)):
            raise UserError(f"model = {options.model!r} is a {type(model).__name__}; a CLIP or SigLIP model is needed")
        self._model = model.eval().requires_grad_(False).to(options.torch_device())
        self._images: Any = options.load(AutoImageProcessor.from_pretrained)
        self._words: Any = options.load(AutoTokenizer.from_pretrained)
        self._batch_size = options.batch_size

    @torch.inference_mode()
    def images(self, frames: Sequence[np.ndarray]) -> np.ndarray:
        """N frames, uint8 [H, W, 3] each -> float32 [N, E]."""
        parts = []
        for start in range(0, len(frames), self._batch_size):
            batch = list(frames[start : start + self._batch_size])
            pixels = self._images(batch, return_tensors="pt", input_data_format="channels_last")
            pixels = pixels.to(self._model.device, self._model.dtype)
            parts.append(_unit(self._model.get_image_features(**pixels).pooler_output))
        return np.concatenate(parts)

    @torch.inference_mode()
    def texts(self, texts: Sequence[str]) -> np.ndarray:
        """N texts -> float32 [N, E]; texts above the model's length limit are truncated."""
        config = self._model.config
        is_siglip = config.model_type.startswith("siglip")  # trained on texts padded to one length, without a mask
        tokens = self._words(
            list(texts),
            padding="max_length" if is_siglip else True,
            max_length=config.text_config.max_position_embeddings,
            truncation=True,
            return_tensors="pt",
        ).to(self._model.device)
        mask = None if is_siglip else tokens["attention_mask"]
        return _unit(self._model.get_text_features(tokens["input_ids"], attention_mask=mask).pooler_output)


def _unit(vectors: torch.Tensor) -> np.ndarray:
    return torch.nn.functional.normalize(vectors.float(), dim=-1).cpu().numpy()


class JudgeModel:
    """Any model of transformers' AutoModelForImageTextToText whose processor has a chat template."""

    def __init__(self, options: Pretrained, *, answers: Sequence[str]) -> None:
        dtype = getattr(torch, options.dtype)
        self._processor: Any = options.load(AutoProcessor.from_pretrained)
        if getattr(self._processor, "chat_template", None) is None:
            raise UserError(f"model = {options.model!r} has no chat template; choose an instruction-tuned model")
        self._processor.tokenizer.padding_side = "left"  # the next token of every row is the first of its answer
        model: Any = options.load(lambda source: AutoModelForImageTextToText.from_pretrained(source, dtype=dtype))
        self._model = model.eval().requires_grad_(False).to(options.torch_device())
        self._tokens = answer_tokens(self._processor.tokenizer, answers)
        self._batch_size = options.batch_size

    @torch.inference_mode()
    def probabilities(self, clips: Sequence[np.ndarray], question: str) -> list[Mapping[str, float]]:
        """Return p(answer) for each clip [N, H, W, 3] by answer: the sum over the tokens that spell it."""
        by_clip: list[Mapping[str, float]] = []
        for start in range(0, len(clips), self._batch_size):
            inputs = self._inputs(clips[start : start + self._batch_size], question)
            output = self._model.generate(
                **inputs, max_new_tokens=1, do_sample=False, return_dict_in_generate=True, output_logits=True
            )
            for row in output.logits[0].float().softmax(dim=-1):
                by_clip.append({answer: float(row[tokens].sum()) for answer, tokens in self._tokens.items()})
        return by_clip

    def _inputs(self, clips: Sequence[np.ndarray], question: str) -> Any:
        images = [[Image.fromarray(frame) for frame in clip] for clip in clips]
        texts = [self._chat(len(clip), question) for clip in clips]
        inputs = self._processor(images=images, text=texts, padding=True, return_tensors="pt")
        return inputs.to(self._model.device, self._model.dtype)

    def _chat(self, num_images: int, question: str) -> str:
        content = [*({"type": "image"} for _ in range(num_images)), {"type": "text", "text": question}]
        return self._processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)


def answer_tokens(tokenizer: Any, answers: Sequence[str]) -> dict[str, list[int]]:
    """Return the tokens of each answer: as written, lower, upper and capitalised, with and without a leading blank.

    Raises:
        UserError: an answer is not a single token, or two answers are the same one.
    """
    tokens: dict[str, list[int]] = {}
    for answer in answers:
        word = answer.strip()
        written = (word, word.lower(), word.capitalize(), word.upper())
        forms = {f"{blank}{form}" for blank in ("", " ") for form in written}
        encoded = [tokenizer.encode(form, add_special_tokens=False) for form in sorted(forms)]
        known = {ids[0] for ids in encoded if len(ids) == 1 and ids[0] != tokenizer.unk_token_id}
        if not known:
            raise UserError(f"the model has no single token for the answer {answer!r}; choose a shorter word")
        tokens[answer] = sorted(known)
    taken = [token for ids in tokens.values() for token in ids]
    if len(taken) != len(set(taken)):
        raise UserError(f"two of the answers {', '.join(answers)} are the same token to the model; choose other words")
    return tokens

"""The [model] and [data] sections of a language-model recipe, and the options of its engines."""

from __future__ import annotations

import re
from collections.abc import Mapping
from string import Formatter
from typing import Annotated, Literal, Self, TypeVar, get_args

from pydantic import Field, field_validator, model_validator

from cosmos_rl_core.parallel.config import LoraSection, ends_in
from cosmos_rl_core.settings.base import Strict

PLAIN_TEXT = "none"
"""The value of `data.chat_template` for plain-text prompts without a template."""

Overlong = Literal["error", "truncate", "drop"]
Part = Literal["tower", "projector", "language_model"]
PARTS: tuple[Part, ...] = get_args(Part)


N = TypeVar("N", int, float)


def _first_of(pattern: Mapping[str, N], layer: str, *, otherwise: N) -> N:
    """Return the value of the first end that the name of a layer has."""
    return next((value for end, value in pattern.items() if ends_in(layer, [end])), otherwise)


class LLMLoraSection(LoraSection):
    """[model.lora]: train low-rank adapters on linear layers and freeze the model itself."""

    rank: int = Field(default=16, ge=1)
    """Rank of the update of a layer's weight."""
    rank_pattern: dict[str, Annotated[int, Field(ge=1)]] = Field(default_factory=dict)
    """Other ranks by the end of a layer's name, such as { "v_proj" = 32, "3.mlp.up_proj" = 4 }; the first that fits."""
    alpha_pattern: dict[str, Annotated[float, Field(gt=0)]] = Field(default_factory=dict)
    """Other values of alpha, likewise."""
    whole: tuple[Literal["tower", "projector"], ...] = ()
    """Parts of a vision-language model that are trained in full beside the adapters; they get none."""
    serve: Literal["adapter", "merged"] = "adapter"
    """With vLLM: send A and B into its adapter slots, or the weights of adapted layers with B A added to them."""

    def rank_of(self, layer: str) -> int:
        """By `rank_pattern`."""
        return _first_of(self.rank_pattern, layer, otherwise=self.rank)

    def alpha_of(self, layer: str) -> float:
        """By `alpha_pattern`."""
        return _first_of(self.alpha_pattern, layer, otherwise=self.alpha)


class LLMModelConfig(Strict):
    """[model]: the causal language model to train, its dtype and its adapters."""

    path: str = Field(min_length=1)
    """A Hugging Face model id, or a local directory with config.json, weights and tokenizer."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of forward passes and of the engine's weights; [policy.precision] sets that of trained weights."""
    max_length: int | None = Field(default=None, ge=2)
    """Context limit in tokens, prompt and response together; without it the model's own."""
    revision: str | None = None
    """Branch, tag or commit on the hub; only for a model id."""
    lora: LLMLoraSection | None = None
    """Train adapters of the model, and send only them to the engines."""
    scores: bool = False
    """A reward model: one number a text, from a head at its last token, as transformers' sequence classification. Of a
    language model's directory the head is new. For algorithm.name = "reward_model" and "process_reward_model"."""
    freeze: tuple[Part, ...] = ()
    """Parts of a vision-language model that are not trained, and not sent to the engines; they get no adapters."""

    @field_validator("freeze")
    @classmethod
    def _trains_a_part(cls, freeze: tuple[Part, ...]) -> tuple[Part, ...]:
        if not set(PARTS) - set(freeze):
            raise ValueError("no part of the model is trained; leave one out")
        return freeze

    @model_validator(mode="after")
    def _trains_what_is_not_frozen(self) -> Self:
        if self.lora is not None and (both := [part for part in self.lora.whole if part in self.freeze]):
            raise ValueError(f"lora.whole and freeze both have {both[0]!r}; remove it from one of them")
        return self


class MediaSection(Strict):
    """[data.media]: pictures and videos of the rows, for vision-language models."""

    root: str | None = None
    """Folder of relative paths, outside of which no file is read. Not set: the working directory, and any path."""
    schemes: tuple[Literal["data", "file", "http", "https"], ...] = ("data", "file")
    """Kinds of URLs that are read; "https" and "http" fetch from the network."""
    max_bytes: int = Field(default=256 * 1024**2, ge=1)
    """Maximum size of an encoded picture or video."""
    max_decoded_pixels: int = Field(default=64 * 1024**2, ge=1)
    """Maximum number of pixels of a picture, and of a video's frame, as stored; a larger one is an error of its row."""
    max_video_pixels: int = Field(default=2**29, ge=1)
    """Maximum number of pixels of all frames of a video that are in memory at once, three bytes each: for Qwen-VL after
    resizing, for other families and for rewards as stored. A larger one is an error of its row."""
    min_pixels: int | None = Field(default=None, ge=1)
    """Pictures and frames with fewer pixels are enlarged to that number, for Qwen-VL. Not set: as the checkpoint's
    preprocessor_config.json and video_preprocessor_config.json say (for Qwen3-VL the latter limits whole videos);
    likewise the next two."""
    max_pixels: int | None = Field(default=None, ge=1)
    """Pictures and frames with more pixels are reduced to that number."""
    total_pixels: int | None = Field(default=None, ge=1)
    """Maximum number of pixels of all frames of a video together; the frames of a larger one are reduced."""
    fps: float = Field(default=2.0, gt=0)
    """Frames a second that are taken of a video."""
    min_frames: int = Field(default=1, ge=1)
    """Minimum number of frames of a video that has them; shorter ones are taken at a higher rate."""
    max_frames: int = Field(default=768, ge=1)
    """Maximum number of frames of a video; longer ones are taken at a lower rate."""

    @model_validator(mode="after")
    def _limits_are_ranges(self) -> Self:
        if self.min_frames > self.max_frames:
            raise ValueError(f"min_frames = {self.min_frames} is above max_frames = {self.max_frames}")
        if self.min_pixels is not None and self.max_pixels is not None and self.min_pixels > self.max_pixels:
            raise ValueError(f"min_pixels = {self.min_pixels} is above max_pixels = {self.max_pixels}")
        return self

    @property
    def resizes(self) -> bool:
        """Whether it has limits of its own for the size of pictures and frames."""
        return any(limit is not None for limit in (self.min_pixels, self.max_pixels, self.total_pixels))


class LLMDataConfig(Strict):
    """[data]: the source of rows, and their columns with prompt, reference answer and response."""

    path: str = ""
    """A .jsonl, .json or .parquet file, a directory of them, or a Hugging Face datasets id."""
    rows: str | None = Field(default=None, min_length=1)
    """Instead of `path`, Python's "module:attribute": a list of rows, or a function without arguments that returns one.
    A row is a mapping of columns to JSON."""
    split: str | None = None
    """Split: the files of a directory that start with it, or a split of a datasets id ("train" if unset)."""
    subset: str | None = None
    """The configuration name of a datasets id, such as "main" for openai/gsm8k."""
    prompt_column: str = "prompt"
    """Column with the prompt: a string, or a list of chat messages {"role": ..., "content": ...}. "": rows have none,
    and the environment of [environment] begins each episode."""
    prompt_template: str | None = None
    """Builds the prompt from columns instead: "{question}\\nGive the final number after ####."."""
    system_prompt: str | None = None
    """First message of each chat that does not begin with a system message of its own."""
    chat_template: str | None = None
    """A Jinja chat template or the path of a .jinja file; without it the tokenizer's own; "none": plain text."""
    answer_column: str | None = None
    """Column with the reference answer, for rewards that compare with it."""
    answer_pattern: str | None = None
    """Regular expression with one group that cuts the answer out of its column, such as "#### (.*)"."""
    response_column: str | None = None
    """Column with the wanted response, for supervised training; with `label_column` the response that is judged."""
    chosen_column: str | None = None
    """Column with the better of two answers, for preference training: a string, one message of the assistant, or with
    prompt_column = "" a whole chat or text, whose prompt is what it has in common with the rejected one."""
    rejected_column: str | None = None
    """Column with the worse of the two, of the same form."""
    margin_column: str | None = None
    """Column with how much better the chosen answer is, for "reward_model": subtracted from the scores' difference."""
    label_column: str | None = None
    """Column that is true for a good response and false for a bad one, for "kto"; with `steps_column` a list of these,
    one a step."""
    steps_column: str | None = None
    """Column with the steps of a response, a list of texts, for "process_reward_model"."""
    step_separator: str = Field(default="\n", min_length=1)
    """Text between steps, the end of the step before it."""
    messages_column: str | None = None
    """Column with whole chats instead: in supervised training every turn of the assistant is learnt; in reinforcement
    learning the prompt is the part before the last answer."""
    tools_column: str = "tools"
    """Column with the functions that the assistant may call, which the chat template lists: JSON schemas, or their
    text. Rows without it have none; "" reads none."""
    image_column: str | None = None
    """Column with the pictures: a path, a URL, bytes, or a list of these. They fill the parts {"type": "image"} of the
    messages, or come before the text."""
    video_column: str | None = None
    """Column with the videos of the prompt, likewise."""
    media: MediaSection = MediaSection()
    """Reading of pictures and videos."""
    overlong: Overlong = "error"
    """Rows above [model] max_length in supervised training: an error, cut at the end, or dropped; both are counted.
    With "error" rows with pictures or videos are dropped too, unless more than 8 and more than half are."""
    limit: int | None = Field(default=None, ge=1)
    """Read only the first rows."""

    @field_validator("prompt_template")
    @classmethod
    def _template_names_columns(cls, template: str | None) -> str | None:
        if template is None:
            return None
        try:
            names = [name for _, name, _, _ in Formatter().parse(template) if name is not None]
        except ValueError as error:
            raise ValueError(f"not a format string ({error}); write {{{{ and }}}} for literal braces") from None
        unnamed = [name for name in names if not name.isidentifier()]
        if unnamed:
            raise ValueError(f"{{{unnamed[0]}}} is not a column name; write {{{{ and }}}} for literal braces")
        if not names:
            raise ValueError('names no column, so that every prompt would be the same; write "{column}" where one goes')
        return template

    @field_validator("system_prompt")
    @classmethod
    def _is_a_text(cls, prompt: str | None) -> str | None:
        if prompt is not None and re.fullmatch(r"\S+\.(txt|md|json|jinja|prompt)", prompt):
            raise ValueError("is the text itself, and this looks like the name of a file; write what is in it")
        return prompt

    @field_validator("chat_template")
    @classmethod
    def _is_a_template(cls, template: str | None) -> str | None:
        if template is None or template == PLAIN_TEXT or template.endswith(".jinja") or "{" in template:
            return template
        raise ValueError(
            f'neither a template with {{{{ ... }}}}, nor the path of a .jinja file, nor "{PLAIN_TEXT}" for plain text; '
            "leave it out for the tokenizer's own"
        )

    @field_validator("answer_pattern")
    @classmethod
    def _pattern_has_one_group(cls, pattern: str | None) -> str | None:
        if pattern is None:
            return None
        try:
            groups = re.compile(pattern).groups
        except re.error as error:
            raise ValueError(f"not a regular expression: {error}") from None
        if groups != 1:
            raise ValueError(f"needs exactly one group (...), the answer; this has {groups}")
        return pattern

    @model_validator(mode="after")
    def _answers_fit_together(self) -> Self:
        if self.messages_column is not None and self.response_column is not None:
            raise ValueError("messages_column contains the responses too; remove response_column")
        if (self.chosen_column is None) != (self.rejected_column is None):
            raise ValueError("chosen_column and rejected_column name the two answers of a pair; set both, or none")
        if self.chosen_column is not None and (self.messages_column or self.response_column or self.label_column):
            raise ValueError("a pair has the answers; remove messages_column, response_column and label_column")
        if self.label_column is not None and self.response_column is None and self.steps_column is None:
            raise ValueError("label_column needs response_column, the response that it judges")
        if self.steps_column is not None and (self.label_column is None or self.response_column or self.chosen_column):
            raise ValueError(
                "steps_column needs label_column, and has the response; remove the columns of other answers"
            )
        return self

    @model_validator(mode="after")
    def _keys_fit_together(self) -> Self:
        if not self.path and self.rows is None:
            raise ValueError('path is missing: set it to the location of the rows, or set rows = "module:attribute"')
        if self.rows is not None and (self.path or self.split or self.subset):
            raise ValueError("rows replaces path, split and subset; remove those, or rows")
        if self.answer_pattern is not None and self.answer_column is None:
            raise ValueError("answer_pattern needs answer_column, the column to search")
        if self.messages_column is not None and self.chat_template == PLAIN_TEXT:
            raise ValueError('messages_column needs a chat template; "none" takes prompts of plain text')
        for key in ("image_column", "video_column"):
            if getattr(self, key) is not None and self.chat_template == PLAIN_TEXT:
                raise ValueError(f'{key} needs a chat template; "none" takes prompts of plain text')
        if self.system_prompt is not None and self.chat_template == PLAIN_TEXT:
            raise ValueError('system_prompt needs a chat template; with "none", put it into prompt_template')
        return self


ROUTES = "rollout.options.record_routes"
"""The key by which an engine records the experts of each token."""


class LLMTorchOptions(Strict):
    """[rollout.options] of engine = "torch"."""

    max_sequences: int = Field(default=64, ge=1)
    """Maximum number of concurrent sequences; others wait for a free slot."""
    cache_bytes: int = Field(default=4 * 1024**3, ge=1)
    """Maximum memory for the keys and values of running sequences."""
    episode_cache_bytes: int = Field(default=4 * 1024**3, ge=0)
    """Maximum memory for the keys and values of episodes that wait for their environment. Beyond it those that have
    waited longest are dropped, and computed again for the next turn."""
    record_routes: bool = False
    """Record the experts of each token, and replay them in training (mixtures of experts only)."""
    batch_invariant: bool = False
    """Give a rollout the same bits whatever runs beside it, so that runs can be equal to the bit. Slower: each prompt
    is read in a pass of its own, and a decode step always has `max_sequences` rows. Not for mixtures of experts."""

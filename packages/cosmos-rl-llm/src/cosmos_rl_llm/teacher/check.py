"""A teacher before it is loaded: whether it fits the model. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from cosmos_rl_core.algorithms.config import TeacherSection
from cosmos_rl_core.errors import UserError
from cosmos_rl_core.parallel.dims import ParallelDims
from cosmos_rl_core.plan.shape import ModelShape, check_fit
from cosmos_rl_core.recipe.run import RunConfig
from cosmos_rl_core.storage.json_files import read_json_object
from cosmos_rl_llm.config import LLMModelConfig
from cosmos_rl_llm.model.checkpoint import read_context, read_shape, resolve


def as_model(teacher: TeacherSection, model: LLMModelConfig) -> LLMModelConfig:
    """Return the [model] section that loads the teacher."""
    return LLMModelConfig(path=teacher.path, revision=teacher.revision, dtype=teacher.dtype or model.dtype)


@contextmanager
def of_teacher() -> Iterator[None]:
    """Name the key of the teacher in messages about a model."""
    try:
        yield
    except UserError as error:
        raise UserError(str(error).replace("model.path", "teacher.path").replace("model.rev", "teacher.rev")) from error


def check_teacher(config: RunConfig) -> None:
    """Raise UserError for a teacher that cannot be found, sharded, or has other tokens than the model.

    A model or teacher on the hub, or without tokenizer.json, is compared when it is loaded.
    """
    assert config.teacher is not None
    with of_teacher():
        teacher = Path(resolve(config.teacher.path))
    model = Path(resolve(config.model.path))
    if not (teacher.is_dir() and model.is_dir()):
        return
    shape = teacher_shape(config)
    if shape is not None:
        with of_teacher():
            check_fit(shape, config.policy.parallel, dims=policy_dims(config))
    sees, taught = (_config(directory).get("vision_config") is not None for directory in (teacher, model))
    check_sight(sees, taught, path=config.teacher.path)
    length = config.model.max_length or read_context(model)
    check_length(length, read_context(teacher), path=config.teacher.path)
    if all((directory / "tokenizer.json").is_file() for directory in (teacher, model)):
        check_tokens(_vocabulary(model), _vocabulary(teacher), path=config.teacher.path)


def check_length(length: int | None, teacher: int | None, *, path: str) -> None:
    """Raise UserError where rows may be longer than the teacher's context. None: no limit."""
    if teacher is not None and (length is None or length > teacher):
        rows = "rows of any length" if length is None else f"rows of up to {length} tokens"
        raise UserError(
            f"[teacher] path = {path!r} reads up to {teacher} tokens, and the model {rows}; set model.max_length = "
            f"{teacher}"
        )


def check_sight(sees: bool, taught: bool, *, path: str) -> None:
    """Raise UserError where one of teacher and model is a vision-language model and the other is not."""
    if sees != taught:
        kinds = ("a vision-language model", "a language model")
        one, other = kinds if sees else kinds[::-1]
        raise UserError(f"[teacher] path = {path!r} is {one}, and the model is {other}; choose two of one kind")


def check_tokens(tokens: Mapping[str, int], teacher: Mapping[str, int], *, path: str) -> None:
    """Raise UserError with the first difference between the vocabularies, ids by token, of model and teacher."""
    if (difference := first_difference(tokens, teacher)) is not None:
        raise UserError(
            f"[teacher] path = {path!r} has another tokenizer than the model: {difference}; choose a teacher of the "
            "same family"
        )


def first_difference(tokens: Mapping[str, int], teacher: Mapping[str, int]) -> str | None:
    """Return the lowest id whose token differs, as a phrase; None if all are alike."""
    if tokens == teacher:
        return None
    own, other = ({number: token for token, number in each.items()} for each in (tokens, teacher))
    number = min(n for n in own.keys() | other.keys() if own.get(n) != other.get(n))
    return f"token {number} is {_shown(own, number)} in the model's and {_shown(other, number)} in the teacher's"


def _shown(tokens: Mapping[int, str], number: int) -> str:
    return repr(tokens[number]) if number in tokens else "missing"


def _vocabulary(directory: Path) -> Mapping[str, int]:
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(directory / "tokenizer.json")).get_vocab(with_added_tokens=True)


def _config(directory: Path) -> Mapping[str, object]:
    return read_json_object(directory / "config.json", hint="see [teacher] path")


def policy_dims(config: RunConfig) -> ParallelDims:
    return ParallelDims.of(config.policy.parallel, world_size=config.policy.world_size)


def teacher_shape(config: RunConfig) -> ModelShape | None:
    """Return the teacher's shape; None for a hub id, and for a family whose sizes are not known."""
    assert config.teacher is not None
    with of_teacher():
        directory = Path(resolve(config.teacher.path))
        return read_shape(directory, as_model(config.teacher, config.model)) if directory.is_dir() else None

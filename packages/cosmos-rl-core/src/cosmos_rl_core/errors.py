"""Exceptions, by their consequence: a sample is retried or dropped, the user corrects an input, the run ends."""

from __future__ import annotations

import difflib
import functools
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, ParamSpec, TypeVar

if TYPE_CHECKING:
    from types import TracebackType

P = ParamSpec("P")
Result = TypeVar("Result")


class SampleError(Exception):
    """A sample that could not be completed. Its reason is shown to the user and counted; it never gets a reward."""

    def __init__(self, reason: str, *, final: bool = False, mean_reward: float | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.final = final
        """True: a retry cannot succeed (a prompt too long); False: it may."""
        self.mean_reward = mean_reward
        """Of a group that is complete, and left out for its rewards."""


class PromptError(SampleError):
    """A prompt that no engine of this run can answer. The message names the row and the remedy."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason, final=True)


class MediaError(SampleError):
    """A picture or a video that cannot be read or decoded. Names the file; a retry cannot succeed by default."""

    def __init__(self, reason: str, *, final: bool = True) -> None:
        super().__init__(reason, final=final)


class UserError(ValueError):
    """An error that the user can fix: one clear message, exit code 2, no traceback."""


class TakenOver(UserError):
    """Another controller has taken over the run: this one ends without another word to workers or in files."""


class OutOfMemory(UserError):
    """A worker's device has too little memory. The message names the worker and the part of its work."""

    def __init__(self, message: str, *, role: str) -> None:
        super().__init__(message)
        self.role = role
        """policy or rollout."""


class WorkerFailed(Exception):
    """A worker died or raised, and the run cannot continue. Names the worker and its error or last log lines."""


class WorkerLost(WorkerFailed):
    """A worker's process died without an error of its own: another one may take its place."""


class EpochOver(Exception):
    """The policy replicas that train together changed: gradients of the step in work are void, and it is redone."""


class PeersUnreachable(EpochOver):
    """Some policy replicas cannot be connected to."""

    def __init__(self, places: tuple[int, ...]) -> None:
        super().__init__(f"no connection to the policy replicas at {places}")
        self.places = places


def closest(word: str, known: Sequence[str], *, cutoff: float = 0.6) -> str | None:
    """Return the known word most similar to `word`, or None if none is similar: the one that a message suggests.

    A word of the same letters comes first: of "gpro", grpo and gspo are as similar, and two letters are swapped more
    often than one is mistyped.
    """
    near = difflib.get_close_matches(word, known, n=5, cutoff=cutoff)
    return next((other for other in near if sorted(other) == sorted(word)), next(iter(near), None))


def one_line_errors(function: Callable[P, Result]) -> Callable[P, Result]:
    """Decorate a function that scripts call: a UserError of it that nobody catches ends the script without a traceback.

    As on the command line, where the message is all that helps. A hook that the script has set stays.
    """

    @functools.wraps(function)
    def decorated(*args: P.args, **kwargs: P.kwargs) -> Result:
        try:
            return function(*args, **kwargs)
        except UserError:
            if sys.excepthook is sys.__excepthook__:
                sys.excepthook = _print_uncaught
            raise

    return decorated


def _print_uncaught(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    if isinstance(error, UserError):
        print(f"error: {error}", file=sys.stderr)  # noqa: T201 - the interpreter's own output
    else:
        sys.__excepthook__(kind, error, traceback)

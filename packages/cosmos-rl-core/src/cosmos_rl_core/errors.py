"""What can go wrong, by who has to do something about it."""

from __future__ import annotations


class SampleError(Exception):
    """A sample that could not be completed. The reason is shown to the user and counted; it never becomes a number."""

    def __init__(self, reason: str, *, final: bool = False) -> None:
        super().__init__(reason)
        self.reason = reason
        self.final = final
        """True: trying again cannot help (a prompt too long); False: worth another attempt."""


class PromptError(SampleError):
    """A prompt no engine of this run can answer. Names the row and what to do."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason, final=True)


class MediaError(SampleError):
    """A picture or a video that cannot be read or decoded. Names the file; trying again cannot help."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason, final=True)


class UserError(ValueError):
    """Something the user can mend: one clear message, exit code 2, no traceback."""


class WorkerFailed(Exception):
    """A worker died or raised; the run cannot go on without it. Carries the worker's name and last words."""

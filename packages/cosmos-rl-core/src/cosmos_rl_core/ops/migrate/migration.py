"""One migration: the keys of the old recipe, the new recipe, and a sentence for everything that differs.

old = Migration(tomllib.loads(text), defaults={"train.optm_lr": 1e-6})
old.move("train.optm_lr", "policy.optimizer.learning_rate")
old.put("sync.max_staleness", old.take("train.train_policy.allowed_outdated_steps"))
old.ignore("redis", because="no broker is needed")
old.refuse("profiler.*", because="there is no such key")
old.finish()

Every key of the old recipe ends in the new recipe, in `ignored` or in `refused`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any

FILL_IN = "FILL_IN"
"""Value of a key that only the user knows."""
DEFAULT = "the default of the old recipe"


def flatten(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every key with its sections, as in "train.ckpt.save_freq"; arrays of tables stay values."""
    for key, value in table.items():
        if isinstance(value, Mapping) and value:
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


class Migration:
    """An old recipe that becomes a new one, key by key."""

    def __init__(self, old: Mapping[str, Any], *, defaults: Mapping[str, Any]) -> None:
        """defaults: values of keys that the old recipe does not name."""
        self._old = dict(flatten(old))
        self._defaults = defaults
        self.recipe: dict[str, Any] = {}
        """The new recipe, nested."""
        self.notes: dict[str, str] = {}
        """Comments by new key."""
        self.ignored: dict[str, str] = {}
        """Old keys that need no equivalent, with the reason."""
        self.refused: dict[str, str] = {}
        """Old keys whose effect is not available, with the reason."""
        self._seen: set[str] = set()

    def has(self, *patterns: str) -> bool:
        """Whether the old recipe names a key that matches."""
        return any(self._matching(patterns))

    def see(self, key: str) -> Any:
        """Return an old value or its default, for a decision; another rule carries the key over."""
        return self._old.get(key, self._defaults.get(key))

    def take(self, key: str) -> Any:
        """Return an old value or its default. The key counts as carried over."""
        self._seen.add(key)
        return self.see(key)

    def put(self, key: str, value: Any, note: str = "") -> None:
        """Set a key of the new recipe, unless the value is None. note: comment beside it."""
        if value is None:
            return
        *sections, last = key.split(".")
        table = self.recipe
        for section in sections:
            table = table.setdefault(section, {})
        table[last] = value
        if note:
            self.notes[key] = note

    def move(self, old: str, new: str, convert: Callable[[Any], Any] = lambda value: value) -> None:
        """Carry a value or its default over, if there is one; `convert` may return None to leave the key out."""
        note = "" if old in self._old else DEFAULT
        if (value := self.take(old)) is not None:
            self.put(new, convert(value), note)

    def ask(self, key: str, value: Any, note: str) -> None:
        """Set a key, or FILL_IN with a note if there is no value."""
        self.put(key, FILL_IN, note) if value in (None, "") else self.put(key, value)

    def ignore(self, *patterns: str, because: str) -> None:
        """Leave keys out that have no effect here, or need none."""
        self.ignored |= dict.fromkeys(self._take_open(patterns), because)

    def refuse(self, *patterns: str, because: str) -> None:
        """Name keys whose effect is not available."""
        self.refused |= dict.fromkeys(self._take_open(patterns), because)

    def finish(self) -> None:
        """Refuse every key that no rule has taken."""
        self.refuse("*", because="no rule for this key")

    def _take_open(self, patterns: Iterable[str]) -> list[str]:
        keys = [key for key in self._matching(patterns) if key not in self._seen]
        self._seen.update(keys)
        return keys

    def _matching(self, patterns: Iterable[str]) -> Iterator[str]:
        globs = tuple(patterns)
        return (key for key in self._old if any(fnmatchcase(key, pattern) for pattern in globs))

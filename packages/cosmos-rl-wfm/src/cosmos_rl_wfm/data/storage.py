"""Files of a dataset on a disk or in an object store, through fsspec. No torch."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from cosmos_rl_core.errors import UserError
from cosmos_rl_core.imports import pip_install
from cosmos_rl_core.storage.folder import store_errors
from cosmos_rl_core.storage.s3 import ACCESS_KEY_ID, ENDPOINT_URL, REGION_NAME, SECRET_ACCESS_KEY, s3_options

PARTIAL = ".partial"
"""Suffix of files that are being written."""

Range = Sequence[int]
"""First byte and number of bytes of a part of a file."""


def is_remote(location: str) -> bool:
    """Whether the location is a URL of a store, not a local path."""
    return "://" in location and not location.startswith("file://")


def open_store(location: str, *, timeout_s: float = 60.0) -> tuple[Any, str]:
    """Return the fsspec file system of a path or URL, and the path in it.

    Raises:
        UserError: no installed package opens the URL.
    """
    from fsspec.core import url_to_fs

    options = s3_options(timeout_s=timeout_s) if location.startswith(("s3://", "s3a://")) else {}
    text = location if is_remote(location) else os.path.abspath(Path(location.removeprefix("file://")).expanduser())
    try:
        return url_to_fs(text, **options)
    except (ImportError, ValueError) as error:
        hint = (
            pip_install("cosmos-rl-wfm[s3]") if options else "a path, or a URL such as s3://bucket/clips-{000..010}.tar"
        )
        raise UserError(f"cannot open {location}: {error}. Try {hint}.") from error


def read_bytes(location: str, part: Range | None = None, *, timeout_s: float = 60.0, limit: int | None = None) -> bytes:
    """Read a file or a part of it.

    Raises:
        FileNotFoundError: there is no such file.
        UserError: the store refuses or does not answer, or the file has more than `limit` bytes.
    """
    if not is_remote(location):
        with Path(location).expanduser().open("rb") as file:
            _within(limit, os.fstat(file.fileno()).st_size, location)
            if part is None:
                return file.read()
            file.seek(part[0])
            return file.read(part[1])
    files, path = open_store(location, timeout_s=timeout_s)
    start, end = (None, None) if part is None else (part[0], part[0] + part[1])
    with reaching(location):
        if limit is not None:
            _within(limit, files.size(path), location)
        return files.cat_file(path, start=start, end=end)


def _within(limit: int | None, size: int, location: str) -> None:
    if limit is not None and size > limit:
        raise UserError(f"{location}: {size:,} bytes, at most {limit:,} are read")


def cache_folder(path: str | None) -> Path:
    """Return the folder of caches: `path`, or cosmos-rl in the user's cache directory."""
    if path is not None:
        return Path(path).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "cosmos-rl"


def write_atomic(path: Path, data: bytes) -> None:
    """Write a file on this machine atomically: other processes read it complete or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=PARTIAL)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


@contextmanager
def reaching(location: str) -> Iterator[None]:
    """Turn errors and timeouts of a store into one UserError with the endpoint and the settings to check.

    A missing file stays a FileNotFoundError, and errors of a local disk are not changed.
    """
    if not is_remote(location):
        yield
        return
    try:
        yield
    except FileNotFoundError:
        raise
    except (*store_errors(), TimeoutError) as error:
        raise UserError(_refusal(location, error)) from error


def endpoint(environ: Mapping[str, str] = os.environ) -> str:
    """Return the name of the S3 endpoint for messages, without user or password."""
    url = environ.get(ENDPOINT_URL) or environ.get("AWS_ENDPOINT_URL_S3") or environ.get("AWS_ENDPOINT_URL")
    if not url:
        return "the AWS endpoint"
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


def _refusal(location: str, error: BaseException) -> str:
    place = endpoint() if location.startswith(("s3://", "s3a://")) else urlsplit(location).netloc
    message = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, PermissionError):
        return f"{location}: {place} refuses: {message}. Check {ACCESS_KEY_ID}, {SECRET_ACCESS_KEY} and {REGION_NAME}."
    return f"{location}: {place} cannot be reached: {message}. Check {ENDPOINT_URL}, and whether the service is up."

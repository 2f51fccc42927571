"""Routes of the page.

    /                                the page            /static/...               its files
    /api/runs                        list of runs        /api/run/NAME/...         one view of a run
    /api/run/NAME/live               server-sent events: a line whenever files of the run have changed

Every answer is made from files in a thread, so that a slow disk holds up one view alone.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import FileResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from cosmos_rl_core.errors import UserError
from cosmos_rl_core.ops.dashboard.curves import AXES
from cosmos_rl_core.ops.dashboard.rollouts import SORTS
from cosmos_rl_core.ops.dashboard.run import PICTURES, RecordedRun, as_json, find_runs

STATIC = Path(__file__).parent / "static"
LIVE_S = 1.0
RESCAN_S = 5.0
"""Interval in which new runs are looked for."""
MOST_POINTS, MOST_GROUPS, MOST_PIXELS = 4000, 100, 4000


class Runs:
    """The runs in some directories; new ones appear."""

    def __init__(self, paths: Sequence[Path]) -> None:
        """Find the runs. Raises UserError as `find_runs`."""
        self._paths = tuple(paths)
        self._runs = find_runs(self._paths)
        self._due = time.monotonic() + RESCAN_S

    def all(self) -> dict[str, RecordedRun]:
        if time.monotonic() >= self._due:
            self._scan()
        return self._runs

    def get(self, name: str) -> RecordedRun | None:
        if name not in self._runs:
            self._scan()
        return self._runs.get(name)

    def read_ahead(self) -> None:
        """Read the metrics of all runs, so that the first view need not wait for it."""
        for run in self.all().values():
            run.curves.update()

    def _scan(self) -> None:
        with suppress(UserError):  # a directory was removed: its runs stay as they were last seen
            self._runs = find_runs(self._paths, self._runs)
        self._due = time.monotonic() + RESCAN_S


class PageError(Exception):
    """A request that cannot be answered: status code and message."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = code


def build_app(runs: Runs, *, over: asyncio.Event | None = None) -> Starlette:
    """Return the application over these runs. over: set when the server ends; live events end with it."""
    ends = over or asyncio.Event()

    def of_run(view: Callable[[RecordedRun, Request], Any]) -> Callable[[Request], Awaitable[Response]]:
        async def answer(request: Request) -> Response:
            return await asyncio.to_thread(_answer, view, runs, request)

        return answer

    async def listed(request: Request) -> Response:
        return _json(await asyncio.to_thread(lambda: [run.summary() for run in runs.all().values()]))

    async def page(request: Request) -> Response:
        return FileResponse(STATIC / "index.html", headers={"Cache-Control": "no-store"})

    async def live(request: Request) -> Response:
        run = await asyncio.to_thread(runs.get, request.path_params["run"])
        if run is None:
            return PlainTextResponse("no such run", 404)
        return StreamingResponse(
            _changes(run, ends), media_type="text/event-stream", headers={"Cache-Control": "no-store"}
        )

    routes = [Route(f"/api/run/{{run}}/{name}", of_run(view)) for name, view in VIEWS.items()]
    return Starlette(
        routes=[
            Route("/", page),
            Route("/api/runs", listed),
            Route("/api/run/{run}/live", live),
            *routes,
            Mount("/static", StaticFiles(directory=STATIC)),
        ]
    )


def _answer(view: Callable[[RecordedRun, Request], Any], runs: Runs, request: Request) -> Response:
    run = runs.get(request.path_params["run"])
    if run is None:
        return PlainTextResponse("no such run", 404)
    try:
        content = view(run, request)
    except PageError as error:
        return PlainTextResponse(str(error), error.code)
    except FileNotFoundError:
        return PlainTextResponse("there is no such file in the run's directory", 404)
    return content if isinstance(content, Response) else _json(content)


async def _changes(run: RecordedRun, over: asyncio.Event) -> AsyncIterator[str]:
    """Yield an event when status, metrics or rollouts have changed, and a comment otherwise, every LIVE_S."""
    before = None
    while not over.is_set():
        state = await asyncio.to_thread(_state, run)
        if state != before:
            before = state
            yield f"event: change\ndata: {json.dumps(state)}\n\n"
        else:
            yield ": no change\n\n"
        with suppress(TimeoutError):
            await asyncio.wait_for(over.wait(), LIVE_S)


def _state(run: RecordedRun) -> dict[str, Any]:
    status = run.status()
    run.curves.update()
    keys = ("life", "phase", "step", "version")
    shown = {key: status.get(key) for key in keys}
    return {**shown, "steps": run.curves.steps, "time": status.get("time"), "has_media": run.has_media}


def _curves(run: RecordedRun, request: Request) -> Any:
    run.curves.update()
    axis = request.query_params.get("axis", AXES[0])
    if axis not in AXES:
        raise PageError(400, f"axis must be one of {', '.join(AXES)}")
    names = request.query_params.getlist("name") or [name for name in run.curves.names if name not in AXES]
    return run.curves.points(
        axis=axis,
        names=names,
        most=_integer(request, "points", 400, most=MOST_POINTS),
        low=_number(request, "low", -math.inf),
        high=_number(request, "high", math.inf),
    )


def _rollouts(run: RecordedRun, request: Request) -> Any:
    query = request.query_params
    sort = query.get("sort", "file")
    if sort not in SORTS:
        raise PageError(400, f"sort must be one of {', '.join(SORTS)}")
    file = run.rollouts.file(query.get("kind", "step"), _integer(request, "step", 0, most=10**9))
    keep = file.matching(
        low=_number(request, "low", -math.inf), high=_number(request, "high", math.inf), text=query.get("text", "")
    )
    at, count = _integer(request, "at", 0, most=10**9), _integer(request, "count", 20, most=MOST_GROUPS)
    return {"histogram": file.histogram(), **file.page(keep=keep, sort=sort, at=at, count=count)}


def _prompt(run: RecordedRun, request: Request) -> Any:
    """The prompt is named by a place where it is: its text can be longer than an address may be."""
    file = run.rollouts.file(request.query_params.get("kind", "step"), _integer(request, "step", 0, most=10**9))
    sample = _integer(request, "sample", 0, most=2**63)
    group = next((group for group in file.groups if group.sample == sample), None)
    if group is None:
        raise PageError(404, f"this step has no group of sample {sample}")
    (first,) = file.lines(group.rollouts[:1])
    return run.rollouts.through_time(str(first.get("prompt", "")), first.get("prompt_media") or {})


def _timeline(run: RecordedRun, request: Request) -> Any:
    run.timeline.update()
    start, length = _number(request, "start", math.nan), _number(request, "length", math.nan)
    return run.timeline.window(
        start=None if math.isnan(start) else start,
        length=None if math.isnan(length) else max(length, 1e-6),
        pixels=_integer(request, "pixels", 1000, most=MOST_PIXELS),
        end=run.now(),
    )


def _weights(run: RecordedRun, request: Request) -> Any:
    run.timeline.update()
    return run.timeline.pulls(end=run.now())


def _picture(run: RecordedRun, request: Request) -> Response:
    path = run.picture(request.path_params["file"])
    if path is None:
        raise PageError(404, "no such picture")
    return FileResponse(path, media_type=PICTURES[path.suffix])


def _trace(run: RecordedRun, request: Request) -> Response:
    path = run.path / "timeline.json"
    if not path.is_file():
        raise PageError(404, "timeline.json is written at the end of the run")
    return FileResponse(path, media_type="application/json", filename=f"{run.name}-timeline.json")


VIEWS: dict[str, Callable[[RecordedRun, Request], Any]] = {
    "overview": lambda run, request: run.overview(),
    "curves": _curves,
    "rollouts": _rollouts,
    "rollouts/files": lambda run, request: run.rollouts.files(),
    "prompt": _prompt,
    "timeline": _timeline,
    "timeline.json": _trace,
    "members": lambda run, request: run.members(),
    "weights": _weights,
    "machines": lambda run, request: run.machines.read(),
    "media": lambda run, request: run.gallery(),
    "media/{file:path}": _picture,
    "recipe": lambda run, request: run.recipe(),
    "logs": lambda run, request: run.logs(),
}
"""Path below /api/run/NAME/ -> function that returns what is sent as JSON, or a response."""


def _number(request: Request, name: str, default: float) -> float:
    try:
        return float(request.query_params.get(name, default))
    except ValueError:
        raise PageError(400, f"{name} must be a number") from None


def _integer(request: Request, name: str, default: int, *, most: int) -> int:
    try:
        number = int(request.query_params.get(name, default))
    except ValueError:
        raise PageError(400, f"{name} must be a whole number") from None
    least = 0 if name in ("at", "step", "sample") else 1
    if not least <= number <= most:
        raise PageError(400, f"{name} must be from {least} to {most}")
    return number


def _json(value: Any) -> Response:
    return Response(as_json(value), media_type="application/json", headers={"Cache-Control": "no-store"})

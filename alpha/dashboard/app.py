"""The web application: pages, files and the JSON API. Reads only; every answer is made from the run directories at that moment. Floor 8.

    /profiling /gates              the page              /api/runs                        the runs in the folder
    /static/...                    its files             /api/run/NAME/progress?since=       how far it is; cheap
    /static/plotly.min.js          from the wheel        /api/run/NAME/view?points=&first=&last=&with=
                                                         /api/run/NAME/timeline?step=&rank=&from=&to=
                                                         /api/compare?a=&b=               /api/gates?fresh=

A run that cannot be read is an answer, not a failed request: 200 with {"error": {kind, what, came, expected, do}}. A request that is wrong
itself (no such run, a path out of the folder, a number that is none) is 404 or 400 with the same body.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import plotly
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, PlainTextResponse, RedirectResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from alpha.component import Catalogue
from alpha.dashboard import timeline
from alpha.dashboard.folder import Folder
from alpha.dashboard.gates import GateBoard
from alpha.dashboard.live import Live
from alpha.dashboard.progress import error_body
from alpha.errors import AlphaError, InputError

STATIC = Path(__file__).parent / "static"
FILES = {"dashboard.js": "text/javascript", "dashboard.css": "text/css", "icon.svg": "image/svg+xml"}
PLOTLY = Path(plotly.__file__).parent / "package_data" / "plotly.min.js"

POLICY = ("default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; connect-src 'self'; "
          "base-uri 'none'; form-action 'none'; frame-ancestors 'none'")
"""The page loads nothing from elsewhere and runs no text as script; plotly writes style elements, hence 'unsafe-inline' for styles."""

Endpoint = Callable[[Request], Any]


class BadRequest(Exception):
    """A request that is wrong itself: `status` and the error that says how."""

    def __init__(self, status: int, error: AlphaError) -> None:
        super().__init__(str(error))
        self.status, self.error = status, error


def build(folder: Folder, catalogue: Callable[[], Catalogue], *, hosts: frozenset[str] | None) -> Starlette:
    """The application over the runs in `folder`. `hosts`: names that a request's Host may have (None: any), against other sites' pages
    that point a name of theirs at this machine."""
    live, gates = Live(folder), GateBoard(catalogue)
    routes = [
        Route("/", lambda request: RedirectResponse("/profiling")),
        Route("/profiling", _page), Route("/gates", _page),
        Route("/static/plotly.min.js", lambda request: FileResponse(PLOTLY, media_type="text/javascript", headers=_KEEP)),
        Route("/static/{name}", _static),
        Route("/api/runs", _json(lambda request: live.runs())),
        Route("/api/run/{name}/progress", _json(lambda q: live.progress(_run(folder, q), _whole(q, "since", -1, least=-1)))),
        Route("/api/run/{name}/view", _json(lambda q: live.view(
            _run(folder, q), points=_whole(q, "points", 600, least=10, most=5000), first=_maybe(q, "first"), last=_maybe(q, "last"),
            beside=_run(folder, q, "with") if q.query_params.get("with") else None))),
        Route("/api/run/{name}/timeline", _json(lambda q: timeline.window(
            folder.path(_run(folder, q)), _maybe(q, "step"), _maybe(q, "rank"), _maybe(q, "from"), _maybe(q, "to")))),
        Route("/api/compare", _json(lambda q: live.compare(
            _run(folder, q, "a"), _run(folder, q, "b"), anyway=q.query_params.get("anyway") == "1"))),
        Route("/api/gates", _json(lambda q: gates.status(fresh=q.query_params.get("fresh") == "1"))),
    ]  # fmt: skip
    return Starlette(routes=routes, middleware=[Middleware(Guard, hosts=hosts)])


class Guard:
    """Headers of every answer, and no answer for a Host that is not ours."""

    def __init__(self, app: ASGIApp, hosts: frozenset[str] | None) -> None:
        self.app, self.hosts = app, hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers["content-security-policy"] = POLICY
                headers["x-content-type-options"] = "nosniff"
                headers["referrer-policy"] = "no-referrer"
                headers.setdefault("cache-control", "no-store")
            await send(message)

        host = Headers(scope=scope).get("host", "")
        if self.hosts is not None and _name_of(host) not in self.hosts:
            refused = PlainTextResponse("this dashboard answers to its own address only; to serve others start it with --host", 421)
            await refused(scope, receive, guarded)
            return
        await self.app(scope, receive, guarded)


def _name_of(host: str) -> str:
    """The Host header without its port: 'localhost:8765' -> 'localhost', '[::1]:8765' -> '[::1]'."""
    name, _, port = host.rpartition(":")
    return (name if name and port.isdecimal() else host).lower()


_KEEP = {"cache-control": "max-age=86400"}


async def _page(request: Request) -> Response:
    return FileResponse(STATIC / "index.html", media_type="text/html")


async def _static(request: Request) -> Response:
    name = request.path_params["name"]
    if name not in FILES:
        return PlainTextResponse("no such file", 404)
    return FileResponse(STATIC / name, media_type=FILES[name])


def _json(answer: Endpoint) -> Endpoint:
    """An endpoint that runs `answer` in a thread and says what came of it as JSON."""

    async def endpoint(request: Request) -> Response:
        try:
            return JSONResponse(clean(await run_in_threadpool(answer, request)))
        except BadRequest as bad:
            return JSONResponse(clean({"error": error_body(bad.error)}), bad.status)
        except AlphaError as error:
            return JSONResponse(clean({"error": error_body(error)}))

    return endpoint


def clean(value: Any) -> Any:
    """JSON has no NaN and no infinity: they become null, as a value that is not there. What of a text is no UTF-8 becomes an escape."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, dict):
        return {clean(str(k)): clean(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [clean(v) for v in value]
    return value


def _run(folder: Folder, request: Request, key: str = "name") -> str:
    """The name of an existing run from the path or the query."""
    name = request.path_params[key] if key in request.path_params else request.query_params.get(key, "")
    try:
        folder.path(name)
    except InputError as error:
        raise BadRequest(404, error) from error
    return str(name)


def _maybe(request: Request, key: str) -> int | None:
    return None if request.query_params.get(key) in (None, "") else _whole(request, key, 0, least=-(2**62))


def _whole(request: Request, key: str, default: int, *, least: int, most: int = 2**62) -> int:
    text = request.query_params.get(key)
    if text is None:
        return default
    try:
        value = int(text) if len(text) < 25 else None
    except ValueError:
        value = None
    if value is None or not least <= value <= most:
        raise BadRequest(400, InputError(f"{key} is no usable number", came=repr(text[:40]), expected=f"an integer from {least} to {most}"))
    return value

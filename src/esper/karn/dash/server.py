"""The server of the live page: static files, JSON of runs, and a stream of changes per viewer.

No route takes a path: a run is addressed by its number in the list. Everything is read-only, and reading happens in
threads, so a slow journal does not delay other viewers.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path

import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from esper.karn.dash.guard import Guard
from esper.karn.document import Json, clean
from esper.karn.live_run import Cursor, LiveRuns
from esper.karn.report import SCRIPT_LINK, STYLE_LINK, Explains, compared, web_file
from esper.leyline.errors import EsperError

PAGE = web_file("index.html")
FILES = {
    "/": ("index.html", "text/html"),
    **{f"/{name}": (name, "text/css") for name in STYLE_LINK.findall(PAGE)},
    **{f"/{name}": (name, "text/javascript") for name in SCRIPT_LINK.findall(PAGE)},
}
STREAM_S = 1.0
"""Seconds between two messages of a stream."""
MOST_COMPARED = 16
MOST_DIGITS = 18
"""Maximum number of digits of `Last-Event-ID`."""
HOST = "127.0.0.1"


def make_app(
    directory: Path, is_stopping: Callable[[], bool] = lambda: False, explains: Explains = lambda _path, _env: None
) -> Starlette:
    """Return the application that shows the runs below a directory. It must be wrapped in a `Guard`."""
    runs = LiveRuns(directory)
    runs.listing()  # so that a page that is loaded again finds its run

    async def list_of_runs(_request: Request) -> Response:
        return await answer(runs.listing)

    async def run_document(request: Request) -> Response:
        return await answer(lambda: runs.run(request.path_params["run"]).document())

    async def detail(request: Request) -> Response:
        return await answer(lambda: runs.run(request.path_params["run"]).detail(request.path_params.get("env")))

    async def explained(request: Request) -> Response:
        path, env = runs.path(request.path_params["run"]), request.path_params.get("env")
        return await answer(lambda: clean(explains(path, env)))

    async def rows(request: Request) -> Response:
        query = request.query_params
        try:
            place = int(query["env"]), int(query["episode"]), query["by"], float(query["from"]), float(query["to"])
        except (KeyError, ValueError):
            return PlainTextResponse("rows need env, episode, by, from and to\n", 400)
        if place[2] not in ("step", "train_macs"):
            return PlainTextResponse("by must be step or train_macs\n", 400)
        return await answer(lambda: runs.run(request.path_params["run"]).rows(*place))

    async def compare(request: Request) -> Response:
        numbers = [int(part) for part in request.query_params.get("runs", "").split(",") if part.isdecimal()]
        if not 2 <= len(numbers) <= MOST_COMPARED:
            return PlainTextResponse(f"compare needs 2 to {MOST_COMPARED} runs\n", 400)
        return await answer(lambda: compared([runs.path(n) for n in numbers]))

    async def live(request: Request) -> Response:
        """Stream changes. `Last-Event-ID` is the number of events that the viewer has, as is `since` at first."""
        query = request.query_params
        since = request.headers.get("last-event-id") or query.get("since") or "0"
        position = int(since) if since.isdecimal() and len(since) <= MOST_DIGITS else 0
        cursor = Cursor(position, query.get("version"), query.get("status"))
        changes = stream(runs.run(request.path_params["run"]).changes, cursor, is_stopping)
        return StreamingResponse(changes, media_type="text/event-stream", headers={"cache-control": "no-store"})

    routes = [Route(path, partial(static_file, *file)) for path, file in FILES.items()]
    routes += [
        Route("/api/runs", list_of_runs),
        Route("/api/runs/{run:int}", run_document),
        Route("/api/runs/{run:int}/envs/{env:int}", detail),
        Route("/api/runs/{run:int}/best", detail),
        Route("/api/runs/{run:int}/explained/{env:int}", explained),
        Route("/api/runs/{run:int}/explained/features", explained),
        Route("/api/runs/{run:int}/rows", rows),
        Route("/api/runs/{run:int}/live", live),
        Route("/api/compare", compare),
    ]
    return Starlette(routes=routes, exception_handlers={EsperError: refusal, OSError: refusal})


def static_file(name: str, media_type: str, _request: Request) -> Response:
    """Return a file of the page."""
    return Response(web_file(name), media_type=media_type)


async def answer(read: Callable[[], object]) -> Response:
    """Return the result of `read` as JSON; 404 if it is None."""
    content = await run_in_threadpool(read)
    if content is None:
        return PlainTextResponse("not found\n", 404)
    return Response(msgspec.json.encode(content), media_type="application/json")


async def refusal(_request: Request, error: Exception) -> Response:
    """Return the message of an error as text."""
    return PlainTextResponse(f"{clean(str(error))}\n", 404)


async def stream(
    changes: Callable[[Cursor], Json | None], cursor: Cursor, is_stopping: Callable[[], bool]
) -> AsyncIterator[bytes]:
    """Yield server-sent events: what changed since the viewer's cursor, once per STREAM_S, until the server stops."""
    yield b"retry: 2000\n\n"
    while not is_stopping():
        try:
            patch = await run_in_threadpool(changes, cursor)
        except (EsperError, OSError):  # the run was removed; a new request gets the reason
            return
        if patch is None:
            yield b": nothing new\n\n"  # fails if the viewer has gone
        else:
            cursor = Cursor(patch["position"], patch["version"], patch["run"]["status"])
            yield b"id: %d\ndata: %b\n\n" % (cursor.position, msgspec.json.encode(patch))
        await asyncio.sleep(STREAM_S)


def serve(
    directory: Path, port: int, ready: Callable[[str], None], explains: Explains = lambda _path, _env: None
) -> None:
    """Serve until interrupted. `ready` receives the URL with its token. Port 0 takes a free one."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((HOST, port))
    listener.listen()  # a browser that is opened now waits, and is not refused
    port = listener.getsockname()[1]
    token = secrets.token_urlsafe(24)
    app = Guard(make_app(directory, lambda: server.should_exit, explains), token, port)
    config = uvicorn.Config(
        app, log_level="error", access_log=False, server_header=False,
        date_header=False, timeout_graceful_shutdown=3, ws="none",
    )  # fmt: skip
    server = uvicorn.Server(config)
    with listener:
        ready(f"http://{HOST}:{port}/?token={token}")
        server.run(sockets=[listener])

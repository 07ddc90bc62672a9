"""The guard in front of the real application: every declared route, with every kind of request."""

import asyncio
import re
from itertools import product

import pytest

pytest.importorskip("starlette", reason="the live page needs the extra web")
pytest.importorskip("uvicorn", reason="the live page needs the extra web")

from esper.karn.dash.guard import SECURITY_HEADERS, Guard
from esper.karn.dash.server import make_app
from tests.support.guard_requests import ORIGINS, OWN_HOSTS, PORT, SITES, TOKEN, TOKENS, call, credentials
from tests.support.sample_runs import grow_run

HOSTS = ("127.0.0.1:8123", "evil.example:8123")
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE")


@pytest.fixture(scope="module")
def app(tmp_path_factory):
    root = tmp_path_factory.mktemp("guarded")
    grow_run(root / "hidden-name")
    return make_app(root, explains=lambda _path, env: {"env": env})


def paths_of(app):
    """Return one path per declared route, with 0 for every parameter."""
    return [re.sub(r"\{[^}]*\}", "0", route.path) for route in app.routes]


def scope_of(path, method="GET", host=OWN_HOSTS[0], origin=None, site=None, cookie=None, query=""):
    values = {"host": host, "origin": origin, "sec-fetch-site": site, "cookie": cookie}
    headers = [(name.encode(), value.encode()) for name, value in values.items() if value is not None]
    return {"type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "scheme": "http", "method": method,
            "path": path, "raw_path": path.encode(), "root_path": "", "query_string": query.encode(),
            "headers": headers, "server": ("127.0.0.1", PORT), "client": ("127.0.0.1", 1)}  # fmt: skip


def is_allowed(method, host, origin, site):
    own = host in OWN_HOSTS and origin in (None, f"http://{host}") and site in (None, "same-origin", "none")
    return own, own and method in ("GET", "HEAD")


@pytest.mark.parametrize("token", TOKENS)
def test_no_refused_request_reaches_a_route(app, token):
    """A refused request is answered without waiting, so `call` needs no event loop: the application would wait."""
    guard = Guard(app, TOKEN, PORT)
    for path, method, host, origin, site in product(paths_of(app), METHODS, HOSTS, ORIGINS, SITES):
        own, allowed = is_allowed(method, host, origin, site)
        if allowed and token == "right cookie":
            continue
        start, end = call(guard, scope_of(path, method, host, origin, site, **credentials(token)))
        case = (path, method, host, origin, site)
        assert start["status"] == (303 if allowed and token == "right URL" else 405 if own and not allowed else 403), (
            case
        )
        assert dict(start["headers"]).items() >= SECURITY_HEADERS.items(), case
        assert b"hidden-name" not in end["body"], case


async def status_of(guard, scope):
    """Return status and headers of the start of an answer; the client leaves after it."""
    started = asyncio.get_running_loop().create_future()

    async def send(message):
        if message["type"] == "http.response.start" and not started.done():
            started.set_result((message["status"], dict(message["headers"])))

    async def receive():
        return {"type": "http.disconnect"}

    task = asyncio.ensure_future(guard(scope, receive, send))
    try:
        return await asyncio.wait_for(started, 20)
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@pytest.mark.parametrize("site", [None, "same-origin", "none"])
def test_every_route_answers_an_allowed_request_with_security_headers(app, site):
    guard = Guard(app, TOKEN, PORT)
    for path, method in product(paths_of(app), ("GET", "HEAD")):
        scope = scope_of(path, method, site=site, **credentials("right cookie"))
        status, headers = asyncio.run(status_of(guard, scope))
        assert status in (200, 400), (path, method)  # 400: the query is missing
        assert headers.items() >= SECURITY_HEADERS.items(), path
        assert not [name for name in headers if name.startswith(b"access-control")], path


def test_routes_take_numbers_and_no_paths(app):
    parameters = [parameter for route in app.routes for parameter in re.findall(r"\{([^}]*)\}", route.path)]
    assert parameters
    assert all(parameter.endswith(":int") for parameter in parameters)

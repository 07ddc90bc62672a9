"""The guard of the live page: every combination of request properties, against an application that records calls."""

from __future__ import annotations

from itertools import product

import pytest

from esper.karn.dash.guard import MOST_TARGET_BYTES, SECURITY_HEADERS, Guard
from tests.support.guard_requests import ORIGINS, OWN_HOSTS, PORT, SITES, TOKEN, TOKENS, call, credentials

FOREIGN_HOSTS = ("evil.example", "evil.example:8123", "127.0.0.1", "127.0.0.1:80", "LOCALHOST.:8123", "[::1]:8123", "")
ROUTES = ("/", "/runs", "/events", "/static/page.js", "//evil.example/", "/none", "/%2e%2e/secret")
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "CONNECT", "get", "PROPFIND")


class Application:
    """Answers every request with a secret; counts the scopes it received."""

    def __init__(self):
        self.scopes = []

    async def __call__(self, scope, receive, send):
        self.scopes.append(scope["type"])
        if scope["type"] == "http":
            headers = [(b"content-type", b"text/plain"), (b"Cache-Control", b"public")]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await send({"type": "http.response.body", "body": b"secret"})


def request(path="/", method="GET", host=OWN_HOSTS[0], origin=None, site=None, cookie=None, query="", more=()):
    """Send one request. Return (status, headers, body, whether the application was called)."""
    values = {"host": host, "origin": origin, "sec-fetch-site": site, "cookie": cookie}
    headers = [(name.encode(), value.encode("latin-1")) for name, value in values.items() if value is not None]
    scope = {"type": "http", "method": method, "path": path, "query_string": query.encode("latin-1")}
    scope["headers"] = headers + list(more)
    app = Application()
    messages = call(Guard(app, TOKEN, PORT), scope)
    body = b"".join(message.get("body", b"") for message in messages[1:])
    return messages[0]["status"], dict(messages[0]["headers"]), body, bool(app.scopes)


@pytest.mark.parametrize("token", TOKENS)
@pytest.mark.parametrize("host", OWN_HOSTS + FOREIGN_HOSTS)
def test_attack_matrix(host, token):
    for path, method, origin, site in product(ROUTES, METHODS, ORIGINS, SITES):
        status, headers, body, reached = request(path, method, host, origin, site, **credentials(token))
        allowed_source = (
            host in OWN_HOSTS and origin in (None, f"http://{host}") and site in (None, "same-origin", "none")
        )
        allowed = allowed_source and method in ("GET", "HEAD")
        case = (path, method, origin, site)
        assert reached == (allowed and token == "right cookie"), case
        assert (status == 303) == (allowed and token == "right URL"), case
        if not reached:
            assert b"secret" not in body, case
            assert status == (
                303 if allowed and token == "right URL" else 405 if allowed_source and not allowed else 403
            ), case
            assert (b"set-cookie" in headers) == (status == 303), case
            assert TOKEN.encode() not in body, case
        assert all(headers[name] == value for name, value in SECURITY_HEADERS.items()), case


def test_token_in_the_url_becomes_a_cookie_and_leaves_the_url():
    status, headers, body, _ = request("/runs", query=f"a=1&token={TOKEN}&b=%3D%20%26")
    assert status == 303
    assert headers[b"location"] == b"http://127.0.0.1:8123/runs?a=1&b=%3D+%26"
    assert headers[b"set-cookie"] == f"esper_dash_8123={TOKEN}; HttpOnly; SameSite=Strict; Path=/".encode()
    assert body == b""
    assert request("/runs", cookie=f"esper_dash_8123={TOKEN}")[3]


@pytest.mark.parametrize("path", ["//evil.example/", "/\\evil.example", "/a\r\nx: y", "/ü", "/%2F%2Fevil.example"])
def test_redirect_stays_on_the_own_host_and_on_one_line(path):
    location = request(path, query=f"token={TOKEN}")[1][b"location"]
    assert location.startswith(b"http://127.0.0.1:8123/")
    assert not set(location) & set(b"\r\n\\ ")


@pytest.mark.parametrize(
    "query",
    [
        f"token={TOKEN}&token={TOKEN}x",
        f"token=x&token={TOKEN}",
        "token=",
        "token=%ff%00",
        "token=ü",
        f"token={TOKEN} ",
        f"token={TOKEN}x",
        f"TOKEN={TOKEN}",
    ],
)
def test_malformed_tokens_in_the_url_are_refused(query):
    status, headers, _, reached = request(query=query)
    assert (status, reached) == (403, False)
    assert b"set-cookie" not in headers


def test_wrong_token_in_the_url_is_refused_despite_a_right_cookie():
    assert request(query="token=x", cookie=f"esper_dash_8123={TOKEN}")[0] == 403


@pytest.mark.parametrize("name", [b"host", b"origin", b"sec-fetch-site", b"Host", b"Origin", b"SEC-FETCH-SITE"])
def test_a_second_foreign_header_is_refused(name):
    more = [(name, b"http://evil.example")]
    assert request(cookie=f"esper_dash_8123={TOKEN}", more=more)[0] == 403


@pytest.mark.parametrize("cookie", ["", ";;=", "esper_dash_8123", f"x{TOKEN}", f"esper_dash_8123=ü{TOKEN}"])
def test_malformed_cookies_are_refused(cookie):
    assert request(cookie=cookie)[0] == 403


def test_a_foreign_cookie_of_the_same_name_does_not_lock_out():
    """Another server of this machine may set a cookie of this name."""
    assert request(cookie=f"esper_dash_8123=x; esper_dash_8123={TOKEN}")[3]


def test_head_has_no_body_and_names_the_allowed_methods():
    status, headers, body, _ = request(method="HEAD")
    assert (status, body) == (403, b"")
    assert int(headers[b"content-length"]) > 0
    assert request(method="POST")[1][b"allow"] == b"GET, HEAD"


def test_headers_of_the_application_do_not_weaken_the_guard():
    names = [name.lower() for name in request(cookie=f"esper_dash_8123={TOKEN}")[1]]
    assert len(names) == len(set(names))
    assert b"content-type" in names


def test_websockets_are_refused_with_a_right_cookie():
    app = Application()
    headers = [(b"host", OWN_HOSTS[0].encode()), (b"cookie", f"esper_dash_8123={TOKEN}".encode())]
    messages = call(
        Guard(app, TOKEN, PORT), {"type": "websocket", "path": "/", "query_string": b"", "headers": headers}
    )
    assert [message["type"] for message in messages] == ["websocket.close"]
    assert app.scopes == []


def test_upgrades_and_long_addresses_are_refused_with_a_right_cookie():
    cookie = f"esper_dash_8123={TOKEN}"
    for protocol in (b"websocket", b"h2c", b""):
        assert request(cookie=cookie, more=[(b"Upgrade", protocol)])[::3] == (403, False)
    assert request("/" + "9" * MOST_TARGET_BYTES, cookie=cookie)[::3] == (414, False)
    assert request(query="x=" + "9" * MOST_TARGET_BYTES, cookie=cookie)[::3] == (414, False)
    assert request("/" + "9" * (MOST_TARGET_BYTES - 1), cookie=cookie)[3]


def test_lifespan_passes_and_unknown_scopes_raise():
    app = Application()
    call(Guard(app, TOKEN, PORT), {"type": "lifespan"})
    assert app.scopes == ["lifespan"]
    with pytest.raises(ValueError, match="not 'webtransport'"):
        Guard(app, TOKEN, PORT)({"type": "webtransport"}, None, None).send(None)
    assert app.scopes == ["lifespan"]


@pytest.mark.parametrize("token", ["", "short", "ü" * 20])
def test_weak_tokens_are_refused(token):
    with pytest.raises(ValueError, match=r"secrets\.token_urlsafe"):
        Guard(Application(), token, PORT)

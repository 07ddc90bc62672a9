"""A deny-by-default ASGI middleware: only the browser of the person who started the server gets an answer.

A server on the loopback interface is reachable from every web page that the user visits, and from every program on
the machine. Each check stops one way in: Host stops DNS rebinding, Origin and Sec-Fetch-Site stop other sites,
the method stops changes, and the token stops other programs and users. A request must pass all of them.
"""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any
from urllib.parse import parse_qsl, quote, urlencode

from starlette.responses import PlainTextResponse

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]

MIN_TOKEN_LENGTH = 16
MOST_TARGET_BYTES = 2048
"""Maximum length of path and query of a request. The page needs less than 100; numbers in it stay convertible."""

SECURITY_HEADERS: dict[bytes, bytes] = {
    b"content-security-policy": b"default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    b"img-src 'self' data:; base-uri 'none'; frame-ancestors 'none'; form-action 'none'",
    b"x-content-type-options": b"nosniff",
    b"referrer-policy": b"no-referrer",
    b"cache-control": b"no-store",
    b"cross-origin-resource-policy": b"same-origin",
    b"cross-origin-opener-policy": b"same-origin",
}
"""Headers of every response. They replace headers of the same name from the application."""


class Guard:
    """Pass a request to `app` only if it comes from this server's own page and carries the token.

    `GET /?token=…` answers with a cookie and a redirect to the same URL without the token, so the token stays out of
    the address bar and the history. Cookies are shared by all ports of a host: the port is part of the cookie's name.
    """

    def __init__(self, app: Application, token: str, port: int) -> None:
        if len(token) < MIN_TOKEN_LENGTH or not token.isascii():
            raise ValueError(f"token needs at least {MIN_TOKEN_LENGTH} ASCII characters. Use secrets.token_urlsafe().")
        self.cookie = f"esper_dash_{port}"
        self._app = app
        self._token = token.encode()
        self._hosts = (f"127.0.0.1:{port}".encode(), f"localhost:{port}".encode())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one connection. Unknown kinds of connection raise, as the ASGI specification requires."""
        match scope["type"]:
            case "lifespan":
                await self._app(scope, receive, send)
            case "websocket":
                await send({"type": "websocket.close", "code": 1008, "reason": ""})
            case "http":
                secured = _with_security_headers(send)
                reply = self._reply(scope)
                if reply is None:
                    await self._app(scope, receive, secured)
                else:
                    reply.body = b"" if scope["method"] == "HEAD" else reply.body
                    await reply(scope, receive, secured)
            case other:
                raise ValueError(f"the guard handles http, websocket and lifespan, not {other!r}")

    def _reply(self, scope: Scope) -> PlainTextResponse | None:
        """Return the guard's own reply to a request, or None if the application may answer it."""
        reply = _refusal_of_origin(scope, self._hosts)
        if reply is not None:
            return reply
        query = parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True)
        tokens = [value for name, value in query if name == "token"]
        if tokens:
            return self._exchange(scope, tokens, [pair for pair in query if pair[0] != "token"])
        if not self._has_cookie(scope):
            return PlainTextResponse("Open the URL that `esper dash` printed.\n", 403)
        return None

    def _exchange(self, scope: Scope, tokens: list[str], query: list[tuple[str, str]]) -> PlainTextResponse:
        """Reply to a URL with a token: set the cookie and redirect to the URL without the token."""
        if len(tokens) != 1 or not self._is_token(tokens[0].encode()):
            return PlainTextResponse("Open the URL that `esper dash` printed.\n", 403)
        # An absolute URL: a path such as //example.org would otherwise name another host.
        location = f"http://{_values(scope, b'host')[0].decode()}{quote(scope['path'])}"
        if query:
            location += "?" + urlencode(query)
        cookie = f"{self.cookie}={self._token.decode()}; HttpOnly; SameSite=Strict; Path=/"
        return PlainTextResponse("", 303, {"location": location, "set-cookie": cookie})

    def _has_cookie(self, scope: Scope) -> bool:
        cookies = b";".join(_values(scope, b"cookie")).split(b";")
        pairs = (cookie.strip().partition(b"=") for cookie in cookies)
        return any(name == self.cookie.encode() and self._is_token(value) for name, _, value in pairs)

    def _is_token(self, value: bytes) -> bool:
        return hmac.compare_digest(value, self._token)


def _refusal_of_origin(scope: Scope, hosts: tuple[bytes, ...]) -> PlainTextResponse | None:
    """Return why a request is refused before its token is read, or None."""
    host = _values(scope, b"host")
    if len(host) != 1 or host[0] not in hosts:
        return PlainTextResponse("Wrong host.\n", 403)
    if any(origin != b"http://" + host[0] for origin in _values(scope, b"origin")):
        return PlainTextResponse("Wrong origin.\n", 403)
    if any(site not in (b"same-origin", b"none") for site in _values(scope, b"sec-fetch-site")):
        return PlainTextResponse("Wrong origin.\n", 403)
    if _values(scope, b"upgrade"):
        return PlainTextResponse("Upgrades are refused.\n", 403)
    if len(scope["path"]) + len(scope["query_string"]) > MOST_TARGET_BYTES:
        return PlainTextResponse("The address is too long.\n", 414)
    if scope["method"] not in ("GET", "HEAD"):
        return PlainTextResponse("Only GET and HEAD are allowed.\n", 405, {"allow": "GET, HEAD"})
    return None


def _values(scope: Scope, name: bytes) -> list[bytes]:
    return [value for key, value in scope["headers"] if key.lower() == name]


def _with_security_headers(send: Send) -> Send:
    """Return a `send` that puts the security headers on the start of a response."""

    async def secured(message: Message) -> None:
        if message["type"] == "http.response.start":
            own = [(key, value) for key, value in message.get("headers", []) if key.lower() not in SECURITY_HEADERS]
            message = {**message, "headers": [*own, *SECURITY_HEADERS.items()]}
        await send(message)

    return secured

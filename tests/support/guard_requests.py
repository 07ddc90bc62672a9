"""Properties of requests to the live page, and how one is sent without a server."""

from __future__ import annotations

import pytest

TOKEN = "0123456789abcdefghij"
PORT = 8123
OWN_HOSTS = ("127.0.0.1:8123", "localhost:8123")
TOKENS = ("none", "wrong URL", "wrong cookie", "other port's cookie", "right URL", "right cookie")
ORIGINS = (
    None,
    "http://127.0.0.1:8123",
    "http://localhost:8123",
    "http://evil.example",
    "null",
    "https://127.0.0.1:8123",
)
SITES = (None, "same-origin", "none", "same-site", "cross-site", "")


def call(guard, scope):
    """Send a request to the guard; return the messages of its answer."""
    messages = []

    async def send(message):
        messages.append(message)

    async def receive():
        return {"type": "http.request", "body": b"", "more_body": False}

    with pytest.raises(StopIteration):  # nothing waits, so no event loop is needed: the matrix has 150 000 requests
        guard(scope, receive, send).send(None)
    return messages


def credentials(token):
    """Return the query or cookie of a kind of token, one of TOKENS."""
    return {
        "none": {},
        "wrong URL": {"query": "token=" + "x" * len(TOKEN)},
        "wrong cookie": {"cookie": f"esper_dash_{PORT}={TOKEN[:-1]}"},
        "other port's cookie": {"cookie": f"esper_dash_{PORT + 1}={TOKEN}"},
        "right URL": {"query": f"run=a%26b&token={TOKEN}"},
        "right cookie": {"cookie": f"theme=dark; esper_dash_{PORT}={TOKEN}"},
    }[token]

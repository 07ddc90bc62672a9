"""The server of the live page in a thread, and requests to it."""

from __future__ import annotations

import http.client
import json
import socket
import threading
import time
from contextlib import contextmanager

import pytest

pytest.importorskip("starlette", reason="the live page needs the extra web")
pytest.importorskip("uvicorn", reason="the live page needs the extra web")

import uvicorn

from esper.karn.dash.guard import Guard
from esper.karn.dash.server import make_app

TOKEN = "a-token-of-the-tests"


@contextmanager
def served(directory, token=TOKEN, **options):
    """Serve a directory in a thread and yield the port."""
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    app = Guard(make_app(directory, **options), token, port)
    server = uvicorn.Server(uvicorn.Config(app, log_level="error", timeout_graceful_shutdown=1))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield port
    finally:
        server.should_exit = True
        server.force_exit = True
        thread.join(10)
        listener.close()


def get(port, path, **headers):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    connection.request("GET", path, headers={"Cookie": f"esper_dash_{port}={TOKEN}"} | headers)
    return connection.getresponse()


def get_json(port, path):
    answer = get(port, path)
    assert answer.status == 200, answer.read()
    return json.loads(answer.read())


def messages(answer, count):
    """Return the first messages of a stream as (id, data)."""
    events, number = [], None
    while len(events) < count:
        line = answer.readline().decode().rstrip("\n")
        if line.startswith("id: "):
            number = int(line[4:])
        elif line.startswith("data: "):
            events.append((number, json.loads(line[6:])))
    return events

"""Many viewers, viewers that never read, two servers, and hundreds of runs: training is not slowed down."""

import http.client
import json
import socket
import threading
import time

import pytest

pytest.importorskip("starlette", reason="the live page needs the extra web")
pytest.importorskip("uvicorn", reason="the live page needs the extra web")

from esper.karn import live_run
from esper.karn.live_run import LiveRuns
from esper.nissa.recorder import record
from tests.support.page_server import TOKEN, get, get_json, messages, served
from tests.support.sample_runs import Journal, grow_run, started, step

VIEWERS = 40


def unread_stream(port, path="/api/runs/0/live"):
    """Open a stream with the smallest buffer, and never read it."""
    viewer = socket.socket()
    viewer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
    viewer.connect(("127.0.0.1", port))
    viewer.sendall(
        f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nCookie: esper_dash_{port}={TOKEN}\r\n\r\n".encode()
    )
    return viewer


def test_slow_and_many_viewers_delay_neither_the_run_nor_other_viewers(tmp_path):
    with record("mine", out=tmp_path / "run") as run, served(tmp_path) as port:
        names = tuple(f"env {i}" for i in range(16))
        run.emit(started(env_names=names))
        viewers = [unread_stream(port) for _ in range(VIEWERS)]
        viewers += [socket.create_connection(("127.0.0.1", port)) for _ in range(VIEWERS)]  # and send nothing
        for halting in viewers[VIEWERS:]:
            halting.sendall(b"GET / HTTP/1.1\r\nHost: ")
        slowest = 0.0
        for n in range(1, 201):
            before = time.perf_counter()
            for env in range(len(names)):
                run.emit(step(n, env=env))
            slowest = max(slowest, time.perf_counter() - before)
        run.hub.flush()
        written, deadline = 1 + 200 * len(names), time.monotonic() + 30
        while (first := get_json(port, "/api/runs/0"))["position"] < written and time.monotonic() < deadline:
            time.sleep(0.1)  # another viewer's read, which began before the last event, may be under way
        assert first["position"] == written
        answer = get(port, "/api/runs/0/live", **{"Last-Event-ID": str(first["position"])})
        run.emit(step(201))
        run.hub.flush()
        assert messages(answer, 1)[0][1]["series"]["0"]["columns"]["step"] == [201]
        answer.close()
        assert slowest < 5.0  # a write that waited for a viewer would never end
        for viewer in viewers:
            viewer.close()
    assert get_state(tmp_path / "run") == ("finished", [])


def get_state(path):
    (row,) = LiveRuns(path).listing()["runs"]
    return row["status"], row["missing"]


def test_two_servers_have_tokens_and_cookies_of_their_own(tmp_path):
    for name in ("a", "b"):
        grow_run(tmp_path / name / "run")
    with served(tmp_path / "a") as one, served(tmp_path / "b", "another-token-of-tests") as two:
        both = f"esper_dash_{one}={TOKEN}; esper_dash_{two}=another-token-of-tests"
        for port in (one, two):
            assert get(port, "/api/runs", Cookie=both).status == 200
        assert get(two, "/api/runs", Cookie=f"esper_dash_{two}={TOKEN}").status == 403
        assert get(two, "/api/runs", Cookie=f"esper_dash_{one}={TOKEN}").status == 403
        assert get(two, f"/?token={TOKEN}").status == 403
        assert get(two, "/api/runs", Cookie=both, Origin=f"http://127.0.0.1:{one}").status == 403
        assert get(one, "/api/runs", Cookie=both, **{"Sec-Fetch-Site": "same-site"}).status == 403


def test_runs_that_ended_are_listed_without_reading_them_again(tmp_path, monkeypatch):
    for number in range(200):
        Journal(tmp_path / f"run{number}").close()
    runs = LiveRuns(tmp_path)
    assert len(runs.listing()["runs"]) == 200
    read = []
    original = live_run.run_info
    monkeypatch.setattr(live_run, "run_info", lambda path, name: read.append(name) or original(path, name))
    assert len({row["id"] for row in runs.listing()["runs"]}) == 200
    assert read == []
    Journal(tmp_path / "new").close()
    assert runs.listing()["runs"][0]["id"] in range(201)
    assert read == ["new"]
    (tmp_path / "run7" / "manifest.json").write_bytes((tmp_path / "run7" / "manifest.json").read_bytes() + b"\n")
    runs.listing()
    assert read == ["new", "run7"]


def test_states_of_a_bounded_number_of_runs_are_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(live_run, "MOST_OPEN", 3)
    for number in range(6):
        grow_run(tmp_path / f"run{number}")
    runs = LiveRuns(tmp_path)
    runs.listing()
    opened = [runs.run(number) for number in range(6)]
    assert len(runs._runs) == 3
    assert runs.run(5) is opened[5]
    assert runs.run(0) is not opened[0]
    assert runs.run(0).document()["position"] == opened[0].document()["position"]


@pytest.mark.parametrize(
    ("path", "status"),
    [("/api/runs/{0}", 414), ("/api/runs/{0}/live", 414), ("/api/compare?runs=0,{0}", 414), ("/api/runs/{1}", 404),
     ("/api/runs/{1}/envs/{1}", 404), ("/api/compare?runs=0,{1}", 404), ("/api/runs/0/rows?env={1}&episode=0&by=step"
     "&from=nan&to=inf", 200)],
)  # fmt: skip
def test_numbers_of_thousands_of_digits_are_no_server_error(tmp_path, path, status):
    grow_run(tmp_path / "run")
    with served(tmp_path) as port:
        assert get(port, path.format("9" * 5000, "9" * 500)).status == status


def test_cursor_of_thousands_of_digits_gets_everything(tmp_path):
    grow_run(tmp_path / "run")
    with served(tmp_path) as port:
        answer = get(port, "/api/runs/0/live", **{"Last-Event-ID": "9" * 5000})
        assert messages(answer, 1)[0][1]["since"] == 0
        answer.close()


def test_requests_at_once_are_all_answered(tmp_path):
    grow_run(tmp_path / "run")
    with served(tmp_path) as port:
        answers = []

        def visit():
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
            connection.request("GET", "/api/runs/0", headers={"Cookie": f"esper_dash_{port}={TOKEN}"})
            answers.append(json.loads(connection.getresponse().read())["position"])

        threads = [threading.Thread(target=visit) for _ in range(VIEWERS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert len(answers) == VIEWERS
        assert len(set(answers)) == 1

"""The server of the live page: what each route answers, only new rows travel, and nothing comes from elsewhere."""

import asyncio
import json
import re
import shutil
import socket
import time

import pytest

pytest.importorskip("starlette", reason="the live page needs the extra web")
pytest.importorskip("uvicorn", reason="the live page needs the extra web")


from esper.karn.dash.server import FILES, serve, stream
from esper.karn.live_run import STATUS_S, Cursor, LiveRun
from esper.karn.report import web_file
from esper.leyline.checksums import open_json, seal_json
from esper.nissa.recorder import record
from tests.support.page_server import get, get_json, messages, served
from tests.support.sample_runs import Journal, grow_run, started, step


@pytest.fixture
def runs(tmp_path):
    grow_run(tmp_path / "runs" / "grown")
    grow_run(tmp_path / "runs" / "other", seed=2)
    return tmp_path / "runs"


def test_runs_are_listed_and_addressed_by_number(runs):
    with served(runs) as port:
        listed = get_json(port, "/api/runs")["runs"]
        assert sorted(run["name"] for run in listed) == ["grown", "other"]
        for run in listed:
            content = get_json(port, f"/api/runs/{run['id']}")
            assert (content["run"]["name"], content["run"]["status"]) == (run["name"], "finished")
        assert get_json(port, "/api/runs/0/envs/0")["seeds"]
        for path in ("/api/runs/7", "/api/runs/0/envs/99", "/api/runs/-1", "/api/runs/x", "/api/runs/..%2f..", "/grown",
                     "/app.js/..", "/api/runs/7/live"):  # fmt: skip
            assert get(port, path).status == 404, path


def test_one_run_directory_is_a_list_of_one(runs):
    with served(runs / "grown") as port:
        assert [run["name"] for run in get_json(port, "/api/runs")["runs"]] == ["grown"]


def test_comparison_of_runs(runs):
    with served(runs) as port:
        comparison = get_json(port, "/api/compare?runs=0,1")
        assert comparison["pairs"][0]["worlds"] == [1]
        assert {measure["metric"] for measure in comparison["pairs"][0]["measures"]} >= {"quality", "params"}
        assert get(port, "/api/compare?runs=0").status == 400
        assert get(port, "/api/compare?runs=0,9").status == 404


def test_stream_sends_only_new_rows_after_the_last_event_id(tmp_path):
    with record("mine", out=tmp_path / "run") as run, served(tmp_path) as port:
        run.emit(started())
        for n in range(1, 11):
            run.emit(step(n))
        run.hub.flush()
        first = get_json(port, "/api/runs/0")
        assert len(first["series"]["0"]["columns"]["step"]) == 10
        answer = get(port, "/api/runs/0/live", **{"Last-Event-ID": str(first["position"])})
        assert answer.headers["content-type"].startswith("text/event-stream")
        run.emit(step(11))
        run.hub.flush()
        ((number, patch),) = messages(answer, 1)
        assert (patch["since"], number) == (first["position"], first["position"] + 1)
        assert (patch["series"]["0"]["at"], patch["series"]["0"]["columns"]["step"]) == (10, [11])
        answer.close()
        again = get(port, "/api/runs/0/live", **{"Last-Event-ID": "3"})
        ((_, patch),) = messages(again, 1)
        assert patch["series"]["0"]["columns"]["step"] == list(range(3, 12))
        again.close()


def test_end_of_a_run_reaches_a_viewer(tmp_path):
    with served(tmp_path) as port:
        with record("mine", out=tmp_path / "run") as run:
            run.emit(started())
            run.hub.flush()
            assert [each["name"] for each in get_json(port, "/api/runs")["runs"]] == ["run"]
            first = get_json(port, "/api/runs/0")
            assert first["run"]["status"] == "running"
        answer = get(port, f"/api/runs/0/live?since={first['position']}")
        while (patch := messages(answer, 1)[0][1])["run"]["status"] == "running":
            pass
        assert patch["run"]["status"] == "finished"
        answer.close()


def test_zoom_has_every_row_of_a_long_run(tmp_path):
    journal = Journal(tmp_path / "run")
    journal.write(started())
    for n in range(1, 20_001):
        journal.write(step(n, train_macs=1_000 * n, quality=0.9 if n == 12_345 else 0.5))
    journal.close()
    run = LiveRun(tmp_path / "run")
    assert run.document()["series"]["0"]["stride"] > 1
    rows = run.rows(0, 0, "step", 12_000.0, 12_999.0)
    assert (rows["stride"], rows["columns"]["step"]) == (1, list(range(12_000, 13_000)))
    assert rows["columns"]["quality"][345] == 0.9
    assert run.rows(0, 0, "train_macs", 5_000.0, 7_000.0)["columns"]["step"] == [5, 6, 7]
    assert run.rows(3, 0, "step", 0.0, 9.0)["columns"] == {"step": []}
    whole = run.rows(0, 0, "step", 0.0, 1e9)
    assert whole["stride"] > 1
    assert max(whole["columns"]["quality"]) == 0.9


def test_run_without_a_manifest_is_followed(tmp_path, monkeypatch):
    monkeypatch.setattr("esper.karn.live_run.POLL_S", 0.0)
    monkeypatch.setattr("esper.karn.live_run.STATUS_S", 0.0)
    journal = Journal(tmp_path / "run")
    (tmp_path / "run" / "manifest.json").unlink()
    run, positions = LiveRun(tmp_path / "run"), []
    for n in range(1, 4):
        journal.write(step(n))
        journal.file.flush()
        positions.append(run.document()["position"])
    assert positions == [1, 2, 3]


def test_rows_refuse_a_malformed_query(runs):
    with served(runs) as port:
        for query in ("", "env=0", "env=x&episode=0&by=step&from=0&to=1", "env=0&episode=0&by=path&from=0&to=1"):
            assert get(port, f"/api/runs/0/rows?{query}").status == 400


def test_nothing_is_loaded_from_elsewhere(runs):
    with served(runs) as port:
        for path, (name, media_type) in FILES.items():
            answer = get(port, path)
            body = answer.read().decode()
            assert answer.headers["content-type"].startswith(media_type)
            assert body == web_file(name)
            for place in re.findall(r"""(?:src|href)=["']([^"']+)["']|url\(([^)]+)\)|@import ([^;]+)""", body):
                assert not re.match(r"(https?:)?//", "".join(place).strip("\"'")), place
            assert "eval(" not in body
            assert not re.search(r"""(?:fetch|EventSource|import|WebSocket)\(\s*["'`]\s*(?:https?:|//)""", body)
            assert name == "uplot.js" or "innerHTML" not in body
        assert "unsafe" not in answer.headers["content-security-policy"]


def test_damaged_run_is_an_error_message_and_not_a_crash(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "manifest.json").write_text("{")
    with served(tmp_path) as port:
        assert [run["status"] for run in get_json(port, "/api/runs")["runs"]] == ["unreadable"]
        answer = get(port, "/api/runs/0")
        assert answer.status == 404
        assert b"manifest" in answer.read()


def test_stream_ends_when_the_server_stops():
    async def pieces(is_stopping):
        async with asyncio.timeout(60):  # raises instead of waiting for an endless stream
            return [piece async for piece in stream(lambda _cursor: None, Cursor(), is_stopping)]

    answers = iter([False, True])
    assert asyncio.run(pieces(lambda: True)) == [b"retry: 2000\n\n"]
    assert asyncio.run(pieces(lambda: next(answers))) == [b"retry: 2000\n\n", b": nothing new\n\n"]


def test_removed_or_replaced_run_is_an_error_and_the_new_one_has_another_number(tmp_path):
    path = grow_run(tmp_path / "run")
    with served(tmp_path) as port:
        assert [run["id"] for run in get_json(port, "/api/runs")["runs"]] == [0]
        first = get_json(port, "/api/runs/0")["position"]
        shutil.rmtree(path)
        for route in ("/api/runs/0", "/api/runs/0/live", "/api/runs/0/envs/0"):
            answer = get(port, route)
            assert (answer.status, b"was removed" in answer.read()) == (404, True)
        journal = Journal(path)
        journal.write(started())
        journal.close()
        manifest = open_json((path / "manifest.json").read_bytes()) | {"run_id": "another"}
        (path / "manifest.json").write_bytes(seal_json(json.dumps(manifest).encode()))
        assert [run["id"] for run in get_json(port, "/api/runs")["runs"]] == [1]
        time.sleep(STATUS_S)
        assert get(port, "/api/runs/0").status == 404
        assert get_json(port, "/api/runs/1")["position"] < first


def test_address_can_be_opened_as_soon_as_it_is_printed(tmp_path):
    def ready(url):
        port = int(re.search(r":(\d+)/", url)[1])
        socket.create_connection(("127.0.0.1", port), timeout=5).close()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        serve(tmp_path, 0, ready)

"""Test file access in untrusted run directories: no writes outside, no blocking, bounded reads."""

import errno
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from esper.leyline.atomic_io import (
    Draft,
    locked,
    make_real_directory,
    must_be_real_directory,
    open_own,
    open_regular,
    read_regular,
    write_atomically,
    write_durably,
)

DYING_WRITER = """
import os, signal, sys
from pathlib import Path
from esper.leyline.atomic_io import Draft
Draft(Path(sys.argv[1]), b"half")
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture(autouse=True)
def blocking_fails():
    """Fail a test that blocks, for example in opening a FIFO."""

    def fail(_number, _frame):
        raise RuntimeError("the call blocks")

    before = signal.signal(signal.SIGALRM, fail)
    signal.alarm(120)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture
def mine(tmp_path):
    """Return a user's file outside any run directory."""
    path = tmp_path / "thesis.txt"
    path.write_bytes(b"years")
    return path


def special(path: Path, kind: str, target: Path) -> Path:
    if kind == "link":
        path.symlink_to(target)
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "device":
        path = Path("/dev/zero")
    else:
        path.mkdir()
    return path


@pytest.mark.parametrize("kind", ["link", "fifo", "device", "directory"])
def test_only_regular_files_are_read(tmp_path, mine, kind):
    path = special(tmp_path / "file", kind, mine)
    with pytest.raises(OSError, match="it is a"):
        read_regular(path, 100)


def test_read_regular_enforces_its_limit(mine):
    assert read_regular(mine, 5) == b"years"
    with pytest.raises(OSError, match="more than 4 bytes"):
        read_regular(mine, 4)


def test_links_are_followed_on_request(tmp_path, mine):
    (tmp_path / "link").symlink_to(mine)
    assert read_regular(tmp_path / "link", 5, follow=True) == b"years"
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(OSError, match="FIFO"):
        open_regular(tmp_path / "fifo", follow=True)


@pytest.mark.parametrize("make", [os.symlink, os.link])
def test_lock_on_a_link_is_rejected(tmp_path, mine, make):
    lock = tmp_path / "lock"
    make(mine, lock)
    with pytest.raises(OSError, match="link"), locked(lock, wait_s=1.0):
        pass
    assert mine.read_bytes() == b"years"


def test_link_made_after_the_check_is_not_followed(tmp_path, mine, monkeypatch):
    (tmp_path / "file").symlink_to(mine)
    monkeypatch.setattr(os.path, "islink", lambda _: False)  # as if it became a link later
    for act in (lambda: open_regular(tmp_path / "file"), lambda: open_own(tmp_path / "file", os.O_RDWR | os.O_TRUNC)):
        with pytest.raises(OSError) as error:
            act()
        assert error.value.errno == errno.ELOOP
    assert mine.read_bytes() == b"years"


def test_drafts_never_open_an_existing_file(tmp_path, mine, monkeypatch):
    """A symlink under the name of the next draft is not followed."""
    monkeypatch.setattr("esper.leyline.atomic_io.secrets.token_hex", lambda _: "guessed")
    (tmp_path / ".file.guessed.tmp").symlink_to(mine)
    with pytest.raises(FileExistsError):
        write_atomically(tmp_path / "file", b"new")
    monkeypatch.undo()
    write_atomically(tmp_path / "file", b"new")
    with pytest.raises(FileExistsError):
        write_durably(tmp_path / ".file.guessed.tmp", b"new")
    assert mine.read_bytes() == b"years"


def test_write_replaces_a_link_and_not_its_target(tmp_path, mine):
    (tmp_path / "report.html").symlink_to(mine)
    write_atomically(tmp_path / "report.html", b"new")
    assert (mine.read_bytes(), (tmp_path / "report.html").read_bytes()) == (b"years", b"new")
    assert not (tmp_path / "report.html").is_symlink()


def test_next_writer_removes_the_draft_of_a_killed_one(tmp_path):
    path = tmp_path / "file"
    subprocess.run([sys.executable, "-c", DYING_WRITER, str(path)], check=False)
    assert len(list(tmp_path.iterdir())) == 1
    write_atomically(path, b"new")
    assert [each.name for each in tmp_path.iterdir()] == ["file"]


def test_draft_of_a_live_writer_is_kept(tmp_path):
    slow = Draft(tmp_path / "file", b"slow")
    write_atomically(tmp_path / "file", b"quick")
    slow.replace()
    assert (tmp_path / "file").read_bytes() == b"slow"
    slow = Draft(tmp_path / "file", b"never")
    slow.discard()
    slow.discard()
    assert [each.name for each in tmp_path.iterdir()] == ["file"]


def test_draft_removed_before_locking_is_created_again(tmp_path, monkeypatch):
    from esper.leyline import atomic_io as files

    lock, calls = files.lock_file, []

    def late(fd: int) -> bool:
        if not calls:
            for draft in tmp_path.iterdir():
                draft.unlink()
        calls.append(fd)
        return lock(fd)

    monkeypatch.setattr(files, "lock_file", late)
    write_atomically(tmp_path / "file", b"new")
    assert ((tmp_path / "file").read_bytes(), len(calls)) == (b"new", 2)


def test_make_real_directory_rejects_links_and_files(tmp_path, mine):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "nowhere").symlink_to(tmp_path / "missing")
    for path in (tmp_path / "link", tmp_path / "nowhere", mine):
        with pytest.raises(NotADirectoryError):
            make_real_directory(path)
    make_real_directory(tmp_path / "a" / "b")
    must_be_real_directory(tmp_path / "a" / "b")
    assert not (tmp_path / "missing").exists()


def test_concurrent_writers_leave_a_complete_file(tmp_path):
    """Writers remove only abandoned drafts of others."""
    code = (
        "import sys; from pathlib import Path; from esper.leyline.atomic_io import write_atomically\n"
        "for i in range(200): write_atomically(Path(sys.argv[1]), sys.argv[2].encode() * 1000)"
    )
    writers = [subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "file"), letter]) for letter in "abc"]
    deadline = time.monotonic() + 120
    assert [writer.wait(deadline - time.monotonic()) for writer in writers] == [0, 0, 0]
    content = (tmp_path / "file").read_bytes()
    assert content in {letter * 1000 for letter in (b"a", b"b", b"c")}
    assert [each.name for each in tmp_path.iterdir()] == ["file"]

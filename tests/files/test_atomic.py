"""Files that appear whole or not at all, whatever comes between."""

import errno
import json
import math
import os
import shutil
import signal
import time
from pathlib import Path

import numpy as np
import pytest

from l2r.errors import PathError
from l2r.files import atomic
from l2r.files.atomic import plain_json
from l2r.files.reading import parse_json
from tests.processes import Running


def test_what_is_renamed_is_on_the_disk_before(tmp_path: Path, monkeypatch) -> None:
    """Every byte has left Python's buffer when it is synced, and the file is synced by then."""
    synced, real, replace = [], os.fsync, Path.replace

    def fsync(descriptor: int) -> None:
        synced.append((os.fstat(descriptor).st_size, (tmp_path / "file").exists()))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(
        Path, "replace", lambda *paths: (synced.append("renamed"), replace(*paths))[1]
    )
    atomic.write_bytes(tmp_path / "file", b"x" * 100)
    assert synced[:2] == [(100, False), "renamed"]
    assert len(synced) == 3 and synced[2][1]  # the folder that holds the name


@pytest.mark.parametrize("fails", ["fsync", "replace"])
def test_a_full_disk_keeps_the_old_file_and_leaves_nothing(tmp_path, monkeypatch, fails) -> None:
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    atomic.write_text(tmp_path / "file", "old")
    monkeypatch.setattr(os if fails == "fsync" else Path, fails, full)
    with pytest.raises(PathError, match="/file: no space left"):
        atomic.write_text(tmp_path / "file", "new")
    assert [p.name for p in tmp_path.iterdir()] == ["file"]
    assert (tmp_path / "file").read_text() == "old"


def test_a_folder_that_takes_no_file_is_refused_by_the_name_that_was_asked_for(tmp_path) -> None:
    with pytest.raises(PathError, match="no such file") as raised:
        atomic.new_file(tmp_path / "none" / "page.html")
    assert raised.value.filename == str(tmp_path / "none" / "page.html")


def _die_before_the_name(path: Path) -> None:
    atomic.publish = lambda *_: os._exit(9)
    atomic.write_text(path, "new")


def test_a_process_that_dies_before_the_name_leaves_the_old_file(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path / "file"
    atomic.write_text(path, "old")
    child = Running(tmp_path_factory.mktemp("child"), _die_before_the_name, path)
    assert child.wait() == 9 and path.read_text() == "old"
    (left,) = set(tmp_path.iterdir()) - {path}
    assert left.name.startswith(".file.") and left.name.endswith(".part")  # what prepare removes
    atomic.write_text(path, "newer")
    assert path.read_text() == "newer"


def test_names_of_unfinished_files_cannot_be_guessed(tmp_path: Path) -> None:
    """64 bits drawn for every file: two files, two names, and a name that is taken is refused."""
    names = set()
    for _ in range(2):
        temporary, stream = atomic.new_file(tmp_path / "file")
        stream.close()
        names.add(temporary.name.removeprefix(".file.").removesuffix(".part"))
    assert len(names) == 2 and {len(name) for name in names} == {16}


def test_a_name_that_is_taken_is_refused(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "victim").write_text("kept")
    (tmp_path / ".file.guess.part").symlink_to(tmp_path / "victim")
    monkeypatch.setattr(atomic.secrets, "token_hex", lambda _: "guess")
    with pytest.raises(PathError, match="file exists"):
        atomic.write_text(tmp_path / "file", "new")
    assert (tmp_path / "victim").read_text() == "kept"


def test_files_have_the_permissions_of_the_users_choice(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        atomic.write_text(tmp_path / "file", "")
        atomic.append_text(tmp_path / "log", "")
    finally:
        os.umask(before)
    for name in ("file", "log"):
        assert (tmp_path / name).stat().st_mode & 0o777 == 0o640


def test_a_log_grows_at_its_end(tmp_path: Path) -> None:
    for line in ("one\n", "two é\n"):
        atomic.append_text(tmp_path / "log", line)
    assert (tmp_path / "log").read_text(encoding="utf-8") == "one\ntwo é\n"


def test_a_lock_is_held_once_and_keeps_what_the_file_has(tmp_path: Path) -> None:
    (tmp_path / "lock").write_text("kept")
    with atomic.try_lock(tmp_path / "lock") as mine, atomic.try_lock(tmp_path / "lock") as second:
        assert mine and not second
    with atomic.try_lock(tmp_path / "lock") as again:
        assert again
    assert (tmp_path / "lock").read_text() == "kept"


@pytest.mark.parametrize("kind", ["file", "folder", "link", "nothing"])
def test_what_is_removed_is_gone_and_no_more(tmp_path: Path, kind: str) -> None:
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "file").write_text("")
    path = tmp_path / "gone"
    if kind == "file":
        path.write_text("")
    elif kind == "folder":
        (path / "inner").mkdir(parents=True)
    elif kind == "link":
        path.symlink_to(tmp_path / "kept")
    atomic.remove(path)
    assert [p.name for p in tmp_path.rglob("*")] == ["kept", "file"]


def test_folders_are_made_below_a_link_of_the_users_and_through_no_other(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "root").symlink_to(tmp_path / "disk")
    assert atomic.make_folder(tmp_path / "root", "a", "b") == tmp_path / "root" / "a" / "b"
    assert atomic.make_folder(tmp_path / "root", "a", "b").is_dir()  # also where it is there
    (tmp_path / "disk" / "out").symlink_to(tmp_path / "disk" / "a")
    with pytest.raises(ValueError, match="out is a link"):
        atomic.make_folder(tmp_path / "root", "out", "b", "c")
    assert not (tmp_path / "disk" / "a" / "b" / "c").exists()


@pytest.mark.parametrize("held", [atomic.try_lock, atomic.lock])
def test_a_file_system_without_locks_is_an_error_and_no_wait(tmp_path, monkeypatch, held):
    """Such a lock is nobody's: whoever waits for its end waits forever."""
    fcntl = pytest.importorskip("fcntl")

    def without(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    def waits(_):
        raise AssertionError("it waits")

    monkeypatch.setattr(fcntl, "flock", without)
    monkeypatch.setattr(atomic.time, "sleep", waits)
    with pytest.raises(OSError, match=r"cannot lock .*file: No locks"), held(tmp_path / "file"):
        pass


def test_a_place_is_checked_and_nothing_is_made(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    atomic.check_place(tmp_path / "new" / "folder")
    atomic.check_place(tmp_path)
    for place in ("file", "file/below/it"):
        with pytest.raises(PathError, match="not a directory") as refused:
            atomic.check_place(tmp_path / place)
        assert refused.value.filename == str(tmp_path / "file")
    monkeypatch.setattr(atomic.os, "access", lambda path, mode: False)  # root may write anywhere
    with pytest.raises(PathError, match="permission denied"):
        atomic.check_place(tmp_path / "new")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def _die_in_a_new_folder(out: Path, fails: str) -> None:
    with atomic.new_folder(out) as part:
        (part / "weights").write_bytes(b"a" * 1000)
        if fails == "killed":
            os._exit(9)
        (out.parent / "ready").touch()
        time.sleep(600)


def test_the_next_run_removes_what_a_killed_one_left(tmp_path, tmp_path_factory) -> None:
    """A whole copy of a model stayed beside --out for good, hidden."""
    child = Running(
        tmp_path_factory.mktemp("child"), _die_in_a_new_folder, tmp_path / "new", "killed"
    )
    assert child.wait() == 9
    (left,) = tmp_path.iterdir()
    others = [tmp_path / name for name in (".new", ".new.part", ".other.0123456789abcdef.part")]
    for other in others:
        other.mkdir()
    with atomic.new_folder(tmp_path / "new") as part:
        assert not left.exists() and part.parent == tmp_path
        (part / "file").touch()
    assert {path.name for path in tmp_path.iterdir()} == {"new", *(other.name for other in others)}
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["file"]


def test_a_folder_that_is_being_written_is_left_alone(tmp_path, tmp_path_factory) -> None:
    child = Running(tmp_path_factory.mktemp("child"), _die_in_a_new_folder, tmp_path / "new", "")
    try:
        deadline = time.monotonic() + 60
        while not (tmp_path / "ready").exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        (theirs,) = tmp_path.glob(".new.*.part")
        with atomic.new_folder(tmp_path / "new"):
            assert (theirs / "weights").stat().st_size == 1000
        assert theirs.exists()
    finally:
        child.send_signal(signal.SIGKILL)
        child.wait()
    shutil.rmtree(tmp_path / "new")
    with atomic.new_folder(tmp_path / "new"):
        assert not theirs.exists()


def test_a_block_that_fails_leaves_nothing(tmp_path) -> None:
    with pytest.raises(KeyError), atomic.new_folder(tmp_path / "new") as part:
        (part / "file").touch()
        raise KeyError
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "file").touch()
    refused = pytest.raises(ValueError, match="out must be a new or empty folder")
    with refused, atomic.new_folder(tmp_path / "new"):
        pass


def test_an_empty_folder_that_cannot_be_replaced_is_refused_at_once(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    for out in (Path(), Path(), tmp_path):
        with pytest.raises(ValueError, match="the folder you are in: name a folder in it"):
            atomic.check_new_folder(out)
    place = tmp_path / "out"
    place.mkdir()
    atomic.check_new_folder(place)
    with monkeypatch.context() as mounted:
        mounted.setattr(Path, "is_mount", lambda path: path == place)
        with pytest.raises(ValueError, match="a mount point: name a folder in it"):
            atomic.check_new_folder(place)
        atomic.check_new_folder(place / "model")
    access = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path and access(path, mode))
    with pytest.raises(OSError, match="permission denied"):
        atomic.check_new_folder(place)


def test_without_locks_folders_are_written_and_none_is_removed(tmp_path, monkeypatch) -> None:
    def none(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    left = tmp_path / ".new.0123456789abcdef.part"
    left.mkdir()
    monkeypatch.setattr(atomic, "_lock", none)
    with atomic.new_folder(tmp_path / "new") as part:
        (part / "file").touch()
    assert (tmp_path / "new" / "file").exists() and left.exists()


def test_a_link_that_looks_like_such_a_folder_is_not_followed(tmp_path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "file").touch()
    (tmp_path / ".new.0123456789abcdef.part").symlink_to(tmp_path / "mine")
    with atomic.new_folder(tmp_path / "new"):
        pass
    assert (tmp_path / "mine" / "file").exists()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, np.float64("nan")])
def test_a_number_that_is_not_finite_is_null_at_any_depth(bad):
    value = {"a": bad, "b": [1.5, bad, {"c": (bad, "NaN", None, True, 7)}]}
    parsed = parse_json(plain_json(value).encode())
    assert parsed == {"a": None, "b": [1.5, None, {"c": [None, "NaN", None, True, 7]}]}


def test_all_else_is_as_json_writes_it():
    value = {"z": [0.1, 1e300, -3, "ä\n"], "a": {"1": None, "2": [False, (2, 3)]}, "e": []}
    assert plain_json(value) == json.dumps(value, indent=2)
    assert plain_json(value, indent=None) == json.dumps(value, separators=(",", ":"))

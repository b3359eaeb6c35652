"""A compiled kernel is loaded where this user alone can have put it."""

import logging
import os
import platform
from pathlib import Path

import pytest

from l2r.kernels.native import build

COMPILER = """#!/bin/sh
if [ "$1" = --version ]; then echo 1; exit; fi
for word; do last=$word; done
echo run >> {log}
wc -l < {log} > "$last"
"""


@pytest.fixture
def compile_(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The path that is loaded; the file's content is the number of its compilation."""
    script, log = tmp_path / "compiler", tmp_path / "log"
    script.write_text(COMPILER.format(log=log))
    script.chmod(0o755)
    monkeypatch.setenv("L2R_CACHE", str(tmp_path / "cache"))
    return lambda: build._build(str(script))


def test_a_kernel_is_compiled_once(compile_) -> None:
    first = compile_()
    assert compile_() == first and first.read_text().strip() == "1"


@pytest.mark.parametrize("mask", [0o000, 0o002, 0o077])
def test_nobody_else_may_write_what_is_loaded_whatever_the_umask(compile_, mask: int) -> None:
    before = os.umask(mask)
    try:
        path = compile_()
    finally:
        os.umask(before)
    for part in (path, path.parent):
        assert part.stat().st_mode & 0o022 == 0 and part.stat().st_uid == os.getuid()
    assert compile_() == path and path.read_text().strip() == "1"


@pytest.mark.parametrize("mode", [0o720, 0o702])
def test_a_kernel_that_others_may_write_is_compiled_again(compile_, mode: int) -> None:
    path = compile_()
    path.chmod(mode)
    again = compile_()
    assert again.read_text().strip() == "2" and again.stat().st_mode & 0o022 == 0


def test_a_link_in_the_place_of_a_kernel_is_not_followed(compile_, tmp_path: Path) -> None:
    path = compile_()
    path.unlink()
    (tmp_path / "theirs").write_text("theirs")
    path.symlink_to(tmp_path / "theirs")
    assert compile_().read_text().strip() == "2"
    assert (tmp_path / "theirs").read_text() == "theirs"


@pytest.mark.parametrize("mode", [0o720, 0o702])
def test_a_folder_that_others_may_write_is_not_used(compile_, mode: int, caplog) -> None:
    path = compile_()
    path.parent.chmod(mode)
    with caplog.at_level(logging.WARNING, "l2r"):
        other = compile_()
    assert other.read_text().strip() == "2" and other.parent != path.parent
    assert other.parent.stat().st_mode & 0o077 == 0
    (warning,) = (r.message for r in caplog.records if "others may write" in r.message)
    assert str(path.parent) in warning


@pytest.mark.parametrize("part", ["file", "folder"])
def test_a_kernel_of_another_user_is_not_loaded(part: str, compile_, monkeypatch) -> None:
    path = compile_()
    theirs = path if part == "file" else path.parent
    facts, real = theirs.stat(), Path.lstat

    def lstat(self: Path):
        if self != theirs:
            return real(self)
        return os.stat_result((*facts[:4], os.getuid() + 1, *facts[5:]))

    monkeypatch.setattr(Path, "lstat", lstat)
    assert compile_().read_text().strip() == "2"


X86 = "model\t\t: {}\nmodel name\t: X\nflags\t\t: fpu avx2\n"
ARM = "Features\t: fp asimd\nCPU implementer\t: 0x41\nCPU part\t: {}\n"


@pytest.mark.parametrize("text", [X86, ARM])
def test_another_processor_has_another_kernel(text, tmp_path):
    """Folders of caches are shared between machines, and a kernel is for one kind of them."""
    for name in ("one", "other"):
        (tmp_path / name).write_text(f"processor\t: 0\ncpu MHz\t\t: {name}\n" + text.format(name))
    assert build.processor(tmp_path / "one") != build.processor(tmp_path / "other")


def test_the_clock_of_a_processor_is_not_in_its_name(tmp_path):
    for clock in ("2000", "3000"):
        (tmp_path / clock).write_text(f"cpu MHz\t\t: {clock}\n" + X86.format(1))
    assert build.processor(tmp_path / "2000") == build.processor(tmp_path / "3000")


def test_without_a_list_of_processors_their_kind_is_the_name(tmp_path):
    assert build.processor(tmp_path / "absent") == platform.machine().encode() != b""

"""The cache folder: one named, one at home, or one for a process that can have neither."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from l2r.files.cache import cache_folder

SHOWN = """
import os, subprocess, sys
from l2r.files.cache import cache_folder
folder = cache_folder()
(folder / "made").write_text("")
assert cache_folder() == folder
again = "from l2r.files.cache import cache_folder; print(cache_folder())"
print(folder, subprocess.run([sys.executable, "-c", again], capture_output=True, text=True).stdout)
"""


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.delenv("L2R_CACHE", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def test_a_named_folder_stays_as_it_is(home, monkeypatch):
    monkeypatch.setenv("L2R_CACHE", str(home / "named"))
    assert cache_folder() == home / "named" and not (home / "named").exists()


def test_the_home_folder_is_made(home):
    assert cache_folder() == home / ".cache" / "l2r"
    assert cache_folder().is_dir()


def test_a_home_that_holds_nothing_gives_a_folder_for_this_process_and_its_children(home):
    """As in a container that runs as another user than the one of its home."""
    (home / ".cache").write_text("")
    done = subprocess.run([sys.executable, "-c", SHOWN], capture_output=True, text=True, check=True)
    folder, child = done.stdout.split()
    assert child == folder and not Path(folder).exists()
    assert "set L2R_CACHE" in done.stderr and len(done.stderr.splitlines()) == 1


def test_without_a_home_there_is_a_cache_too(home, monkeypatch):
    def unknown():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", unknown)
    monkeypatch.setenv("L2R_CACHE", "")  # so that it is taken back after the test
    assert cache_folder().is_dir() and os.environ["L2R_CACHE"] == str(cache_folder())

"""What a person can mend, and what is a bug: l2r/errors.py."""

import errno
import pickle
from pathlib import Path

import pytest

import l2r
from l2r.errors import InputError, PathError, blames_input, sizes, using
from l2r.routers import build_router


def test_a_caller_catches_what_can_be_mended_as_value_error_and_as_input_error() -> None:
    for kind in (ValueError, InputError, l2r.InputError):
        with pytest.raises(kind, match="top_k must be between 1 and num_experts"):
            build_router("linear", hidden_size=8, num_experts=4, top_k=5)
    assert issubclass(PathError, OSError) and issubclass(PathError, InputError)


def test_errors_of_a_full_disk_name_the_file_whoever_raises_them(tmp_path: Path) -> None:
    """Libraries written in Rust raise classes of their own, which ended in a traceback."""
    for error in (RuntimeError("I/O error: full (os error 28)"), OSError(errno.ENOSPC, "full")):
        with pytest.raises(PathError) as raised, using(tmp_path / "model"):
            raise error
        assert str(raised.value) == f"cannot use {tmp_path / 'model'}: no space left on device"
        assert raised.value.errno == errno.ENOSPC and raised.value.__cause__ is error


@pytest.mark.parametrize("name", ["model", "model/a/b.json", ""])
def test_what_the_system_says_of_a_path_that_was_given_is_bad_input(tmp_path, name) -> None:
    file = str(tmp_path / name)
    with pytest.raises(PathError) as raised, using("elsewhere", tmp_path / "model"):
        raise PermissionError(errno.EACCES, "Permission denied", file)
    assert str(raised.value) == f"cannot use {file.rstrip('/')}: permission denied"
    again = pickle.loads(pickle.dumps(raised.value))  # between processes
    assert str(again) == str(raised.value) and again.filename == raised.value.filename


@pytest.mark.parametrize(
    "error",
    [
        OSError("injected"),
        OSError(errno.EBADF, "Bad file descriptor"),
        OSError(errno.ENOSPC, "full", "/elsewhere"),
        ConnectionError(errno.ECONNREFUSED, ""),
        FileNotFoundError(errno.ENOENT, "No such file", "/elsewhere/model"),
        RuntimeError("28"),
        RuntimeError("nothing (os error 2)"),
        KeyError("model"),
        InputError("refused"),
    ],
)
def test_other_errors_pass_as_they_are(tmp_path: Path, error: Exception) -> None:
    with pytest.raises(type(error)) as raised, using(tmp_path / "model"), sizes():
        raise error
    assert raised.value is error


def test_numbers_that_no_machine_has_are_bad_input() -> None:
    import torch

    for size in (2**62, 2**70):
        with pytest.raises(InputError, match="rank is too large: "), sizes("rank"):
            torch.empty(size, 8)
    with pytest.raises(InputError, match="rank is too large: "), sizes("rank"):
        float(10**400)


def test_only_what_others_raise_and_input_errors_blame_the_input() -> None:
    import json

    from tokenizers import Tokenizer

    def raised(by):
        with pytest.raises(Exception) as caught:
            by()
        return caught.value

    def refused():
        build_router("linear", hidden_size=8, num_experts=4, top_k=5)

    assert blames_input(raised(lambda: json.loads("{")))
    assert blames_input(raised(lambda: Tokenizer.from_str("{")))  # a bare Exception
    assert blames_input(raised(refused))
    assert not blames_input(raised(lambda: {}["name"]))  # of this file, which nobody installed
    assert not blames_input(KeyError("never raised"))

    def installed(module):
        """A function of an installed package that fails."""
        file = json.__file__.replace("__init__", "made_up")
        scope = {"__name__": module}
        exec(compile("def fail(): {}['name']", file, "exec"), scope)
        return scope["fail"]

    assert blames_input(raised(installed("others.reading")))
    for package in ("l2r", "l2r_lab"):
        assert not blames_input(raised(installed(f"{package}.reading")))


def test_what_a_router_of_the_users_refuses_is_bad_input_and_what_ours_raises_is_not() -> None:
    import dataclasses

    from l2r.routers.config import ROUTERS, RouterConfig, refusals_of

    @dataclasses.dataclass(frozen=True)
    class Config(RouterConfig):
        slots: int = 1

        def __post_init__(self) -> None:
            if self.slots < 1:
                raise ValueError("slots must be >= 1")

    with pytest.raises(InputError, match=r"^slots must be >= 1$"), refusals_of(Config):
        Config(slots=0)
    error = ValueError("injected")
    with pytest.raises(ValueError) as raised, refusals_of(ROUTERS["linear"].config):
        raise error
    assert raised.value is error

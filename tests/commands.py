"""Commands in this process, as a person types them."""

import io
from contextlib import redirect_stderr, redirect_stdout
from typing import NamedTuple


class Ended(NamedTuple):
    """How a command ended: its exit code and what it printed."""

    code: int
    out: str
    err: str

    def refusal(self) -> str:
        """The one line on standard error with which a command refuses what it was given."""
        assert self.code == 2 and "Traceback" not in self.out + self.err, self
        return self._error()

    def bug(self) -> str:
        """The one line on standard error with which a command names a bug of ours."""
        assert self.code == 70 and "Traceback" not in self.out + self.err, self
        line = self._error()
        assert line.startswith("error: a bug in l2r, not in what it was given: "), line
        return line

    def _error(self) -> str:
        (line,) = (line for line in self.err.splitlines() if line.startswith("error: "))
        return line


def command(*args: object) -> Ended:
    """``command("train", ...)``: run it to its end."""
    from l2r.cli import main

    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        try:
            main([str(arg) for arg in args])
        except SystemExit as end:
            return Ended(int(end.code or 0), out.getvalue(), err.getvalue())
    raise AssertionError(f"l2r {args[0]} returned; it exits with a code")

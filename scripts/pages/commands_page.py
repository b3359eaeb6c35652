"""Write docs/commands.md: every command with its arguments, options and example, from --help.

    python scripts/pages/commands_page.py

A test compares the page with what the commands say of themselves.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from typer.main import get_command

from l2r.cli.app import build_app

PAGE = Path(__file__).resolve().parents[2] / "docs" / "commands.md"
HEAD = """# Commands

Every command with an example and its options, defaults in brackets; `l2r COMMAND --help` says
more. Made by `python scripts/pages/commands_page.py`.

- A verdict comes first, then a table for 80 columns; `--json` has every column.
- `l2r_sips` and `l2r-sips` are one name.
- `l2r --install-completion` completes words in bash, zsh, fish and PowerShell.
- Bad input is refused within a second; a router's options take the seconds in which torch is
  imported. A command that is stopped keeps what it wrote.

| exit code | what it says |
|---|---|
| 0 | done |
| 1 | done, and something was found or failed: a check, a benchmark, a run of several |
| 2 | bad input, in one line that names the option, field or file; a full memory or disk |
| 70 | a bug in l2r, and a file to report it with |
| 130, 143 | stopped by Ctrl-C, by SIGTERM |

The line of a bug names a file in the folder `bugs` of the cache, with the command, versions and the
traceback, without passwords and tokens. Nothing is sent.

In Python what exits with 2 is `l2r.InputError`, a `ValueError`; paths that the operating system
refuses are an `OSError` too. `torchrun` ends with 1 whatever its ranks end with, and prints that.

| variable | effect |
|---|---|
| `L2R_CACHE` | folder of tokenizers, corpora and compiled kernels (`~/.cache/l2r`) |
| `L2R_CPU_KERNEL=off` | the router's torch code in place of its C++ kernel |
| `L2R_CPU_MARCH` | processor that the C++ kernel is compiled for (`native`) |
| `L2R_GUARD=off` | no comparison of a GPU's kernels with plain code before their first use |
| `L2R_IMPORT` | modules with [routers of your own](add-a-router.md), separated by commas |
| `L2R_KEEP_MEMORY=off` | training on a CPU returns freed memory after each step, a sixth slower |
| `L2R_TRACEBACK=1` | a traceback in place of the one-line error; the exit code stays |

## Shared
"""


def commands(command: Any, words: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    """Every command that does something, with the words that call it, depth first."""
    below = getattr(command, "commands", {})
    if not below:
        yield " ".join(words), command
    for name, child in below.items():
        yield from commands(child, (*words, name))


def shared_rows(calls: list[tuple[str, Any]]) -> dict[str, tuple[str, str]]:
    """Most frequent default and text, by name, of what several commands explain alike."""
    parameters = [parameter for _, command in calls for parameter in shown(command)]
    count = Counter((name_of(one), text_of(one)) for one in parameters)
    defaults = Counter((name_of(one), text_of(one), default_of(one)) for one in parameters)
    often: dict[str, tuple[str, str]] = {}
    for (name, text), times in count.most_common():
        of_this = [key for key in defaults if key[:2] == (name, text)]
        if times > 1 and name not in often:
            often[name] = (max(of_this, key=defaults.__getitem__)[2], text)
    order = sorted(often, key=lambda name: name.startswith("--"))  # arguments first
    return {name: often[name] for name in order}


def shown(command: Any) -> list[Any]:
    """Arguments and options of a command but hidden ones."""
    return [parameter for parameter in command.params if not getattr(parameter, "hidden", 0)]


def section(call: str, command: Any, shared: Mapping[str, tuple[str, str]]) -> str:
    """First sentence of the help, examples, arguments and options; ``shared`` ones by name."""
    text, *examples = (command.help or "").split("Example:")
    summary = " ".join(text.split()).split(". ")[0].rstrip(".")
    lines = [f"## {call}", "", f"{summary}.", ""]
    if examples:
        lines += ["```bash", *(" ".join(example.split()) for example in examples), "```", ""]
    rows, also = [], []
    for one in shown(command):
        default, explained = shared.get(name_of(one), ("", None))
        if text_of(one) != explained:
            rows.append(row(name_of(one), default_of(one), text_of(one)))
        else:
            also.append(f"`{name_of(one)}`{default_of(one) if default_of(one) != default else ''}")
    if also:
        rows.append(f"- [shared](#shared): {', '.join(also)}")
    if rows:
        lines += [*rows, ""]
    return "\n".join(lines)


def name_of(parameter: Any) -> str:
    """CHECKPOINT, FILES ... or --option."""
    if parameter.param_type_name == "argument":
        return str(parameter.name.upper() + (" ..." if parameter.nargs == -1 else ""))
    return ", ".join([*parameter.opts, *parameter.secondary_opts])


def default_of(parameter: Any) -> str:
    """The default in brackets, or that there must be a value; empty where neither says anything."""
    default = parameter.default
    unsaid = default in (None, False, "", ()) or callable(default)
    return " (required)" if parameter.required else "" if unsaid else f" (`{default}`)"


def text_of(parameter: Any) -> str:
    """The help on one line."""
    return " ".join((parameter.help or "").split())


def row(name: str, default: str, text: str) -> str:
    """One argument or option."""
    return f"- `{name}`{default}: {text}"


def page() -> str:
    """The whole page."""
    calls = list(commands(get_command(build_app()), ("l2r",)))
    shared = shared_rows(calls)
    sections = [section(call, command, shared) for call, command in calls]
    rows = [row(name, *explained) for name, explained in shared.items()]
    return "\n".join([HEAD, *rows, "", *sections])


if __name__ == "__main__":
    PAGE.write_text(page())

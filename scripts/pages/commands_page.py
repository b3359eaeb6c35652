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

Made by `python scripts/pages/commands_page.py`: arguments and options, with the default in
brackets. `l2r COMMAND --help` says more of each command. A verdict comes first, then a table for
80 columns; `--json` has every column. `l2r_sips` and `l2r-sips` are one name.
`l2r --install-completion` completes words in bash, zsh, fish and PowerShell.

Bad input gives one line and exit code 2 (`L2R_TRACEBACK=1` shows its origin). An interrupted
command ends with 130 and keeps what it wrote; SIGTERM ends one with 143.

## Shared
"""


def commands(command: Any, words: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    """Every command that does something, with the words that call it, depth first."""
    below = getattr(command, "commands", {})
    if not below:
        yield " ".join(words), command
    for name, child in below.items():
        yield from commands(child, (*words, name))


def shared_rows(calls: list[tuple[str, Any]]) -> dict[str, str]:
    """Rows, by name, that several commands and most of those with that name have alike."""
    count = Counter(row(parameter) for _, command in calls for parameter in shown(command))
    of_name = Counter[str]()
    for text, times in count.items():
        of_name[name_of(text)] += times
    often = {text: n for text, n in count.items() if n > 1 and 2 * n > of_name[name_of(text)]}
    order = sorted(often, key=lambda text: name_of(text).startswith("--"))  # arguments first
    return {name_of(text): text for text in order}


def name_of(text: str) -> str:
    """The name of the argument or option that a row begins with."""
    return text.split("`")[1]


def shown(command: Any) -> list[Any]:
    """Arguments and options of a command but hidden ones."""
    return [parameter for parameter in command.params if not getattr(parameter, "hidden", 0)]


def section(call: str, command: Any, shared: Mapping[str, str]) -> str:
    """First sentence of the help, examples, arguments and options; ``shared`` ones by name."""
    text, *examples = (command.help or "").split("Example:")
    summary = " ".join(text.split()).split(". ")[0].rstrip(".")
    lines = [f"## {call}", "", f"{summary}.", ""]
    if examples:
        lines += ["```bash", *(" ".join(example.split()) for example in examples), "```", ""]
    rows = [row(parameter) for parameter in shown(command)]
    also = [f"`{name}`" for name, text in shared.items() if text in rows]
    rows = [text for text in rows if text not in shared.values()]
    if also:
        rows.append(f"- [shared](#shared): {', '.join(also)}")
    if rows:
        lines += [*rows, ""]
    return "\n".join(lines)


def row(parameter: Any) -> str:
    """One argument or option."""
    if parameter.param_type_name == "argument":
        name = parameter.name.upper() + (" ..." if parameter.nargs == -1 else "")
    else:
        name = ", ".join([*parameter.opts, *parameter.secondary_opts])
    default = parameter.default
    unsaid = default in (None, False, "", ()) or callable(default)
    shown = "" if unsaid else f" (`{default}`)"
    shown = " (required)" if parameter.required else shown
    return f"- `{name}`{shown}: {' '.join((parameter.help or '').split())}"


def page() -> str:
    """The whole page."""
    calls = list(commands(get_command(build_app()), ("l2r",)))
    shared = shared_rows(calls)
    sections = [section(call, command, shared) for call, command in calls]
    return "\n".join([HEAD, *shared.values(), "", *sections])


if __name__ == "__main__":
    PAGE.write_text(page())

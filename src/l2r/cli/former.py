"""Former spellings of commands and options, with the line that names the new one.

Looked at only where the words of a command are refused: a former spelling is never accepted.
"""

from collections.abc import Sequence

_FIT = "l2r swap CHECKPOINT --fit --data PATH"
_COMMANDS = {"upcycle": f"l2r upcycle is now {_FIT}, with the same options"} | {
    f"bench {name}": f"l2r bench {name} is now python -m benchmarks.{name}, in a clone"
    for name in ("router", "memory", "scaling", "moe", "step", "routes")
}
_TREES = "scripts/machines/two_trees.py times two source trees in turns"
# By command and option; with "=" only where a value follows. "": the command has no argument.
_OPTIONS = {
    ("swap", "--fit="): f"--fit takes no value; the text is --data: {_FIT}",
    ("params", "--layers"): "--layers of l2r params is now --num-layers",
    ("landscape", "--layer"): "--layer is now --layers",
    ("sweep", "--plan"): "--plan of l2r sweep is now --show",
    ("bench", "--compare"): f"l2r bench compares no runs; {_TREES}",
    ("bench", "--against"): f"l2r bench compares no runs; {_TREES}",
    ("bench", "--open"): "l2r bench writes no page; it prints its table",
    (
        "report",
        "--bench",
    ): "l2r report shows runs; python -m benchmarks.NAME prints its table",
    ("data prepare", "--workers"): "--workers is now --processes",
    ("data prepare", ""): "OUT of l2r data prepare is now an option: --out OUT",
    ("data tokenizer", ""): "FOLDER of l2r data tokenizer is now an option: --data FOLDER",
}


def new_spelling(words: Sequence[str]) -> str | None:
    """Return the line that names the new spelling of the first former one in refused words."""
    for command, line in _COMMANDS.items():
        if list(words[: command.count(" ") + 1]) == command.split():
            return line
    given = {part for word in words for part in (word, "".join(word.partition("=")[:2]))}
    for (command, option), line in _OPTIONS.items():
        parts = command.split()
        if list(words[: len(parts)]) != parts:
            continue
        first = words[len(parts)] if len(words) > len(parts) else "-"
        if {option, f"{option}="} & given if option else not first.startswith("-"):
            return line
    return None

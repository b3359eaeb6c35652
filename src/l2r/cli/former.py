"""Former spellings of commands and options, with the line that names the new one.

Looked at only where the words of a command are refused: a former spelling is never accepted.
"""

from collections.abc import Sequence

_FIT = "l2r swap CHECKPOINT --fit --data PATH"
_COMMANDS = {"upcycle": f"l2r upcycle is now {_FIT}, with the same options"}
# By command and option; with "=" only where a value follows. "": the command has no argument.
_OPTIONS = {
    ("swap", "--fit="): f"--fit takes no value; the text is --data: {_FIT}",
    ("params", "--layers"): "--layers of l2r params is now --num-layers",
    ("landscape", "--layer"): "--layer is now --layers",
    ("sweep", "--plan"): "--plan of l2r sweep is now --show",
    ("bench", "--compare"): "--compare is now --against",
    ("data prepare", "--workers"): "--workers is now --processes",
    ("data prepare", ""): "OUT of l2r data prepare is now an option: --out OUT",
    ("data tokenizer", ""): "FOLDER of l2r data tokenizer is now an option: --data FOLDER",
}


def new_spelling(words: Sequence[str]) -> str | None:
    """The line that names the new spelling of the first former one in refused words; or None."""
    if words and words[0] in _COMMANDS:
        return _COMMANDS[words[0]]
    given = {part for word in words for part in (word, "".join(word.partition("=")[:2]))}
    for (command, option), line in _OPTIONS.items():
        parts = command.split()
        if list(words[: len(parts)]) != parts:
            continue
        first = words[len(parts)] if len(words) > len(parts) else "-"
        if {option, f"{option}="} & given if option else not first.startswith("-"):
            return line
    return None

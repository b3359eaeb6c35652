"""Text for a terminal: names and values of a stranger's files may hold what steers it."""

import re

# Control characters but tabs and ends of lines, what turns the direction of writing, and halves of
# characters, which no stream takes: a name of a file that is not UTF-8 has them.
_STEERS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str) -> str:
    """The text with ``\\u001b`` for an escape character and the like: JSON stays what it says."""
    return _STEERS.sub(lambda sign: f"\\u{ord(sign[0]):04x}", text)

"""A process that renders chats: settings and messages in, texts out, as lines of JSON.

Run by its path and without this package, whose imports take ten times as long as transformers'
renderer.
"""

import json
import sys
from typing import Any

from transformers.utils.chat_template_utils import render_jinja_template

_REASON = 500  # characters of a message


def main() -> None:
    """Read settings, say that it is ready, and answer each line until there is none."""
    settings = json.loads(sys.stdin.readline())
    _bound_memory(settings["bytes"])
    _say({"text": ""})
    for line in sys.stdin:
        _say(_rendered(json.loads(line), settings))


def _rendered(messages: list[dict[str, str]], settings: dict[str, Any]) -> dict[str, str]:
    try:
        texts, _ = render_jinja_template(
            conversations=[messages],
            chat_template=settings["template"],
            add_generation_prompt=True,
            **settings["tokens"],
        )
    except MemoryError:
        return {"refused": f"it takes more than {settings['bytes'] // 2**20} MiB"}
    except Exception as error:  # of the template, which may refuse what it is given
        return {"refused": str(error)[:_REASON]}
    if len(texts[0]) > settings["characters"]:
        return {"refused": f"its text must have at most {settings['characters']} characters"}
    return {"text": texts[0]}


def _bound_memory(size: int) -> None:
    try:
        import resource
    except ImportError:  # not on Windows
        return
    resource.setrlimit(resource.RLIMIT_AS, (size, size))


def _say(answer: dict[str, str]) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()

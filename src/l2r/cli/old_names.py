"""Names of 0.1.0 that still work: rewritten before a command reads its arguments."""

from collections.abc import Sequence

_ROUTER = {
    "--router": "router.kind={}",
    "--rank": "router.rank={}",
    "--heads": "router.heads={}",
    "--option": "router.{}",
}
# command -> old option -> the new one, or the change of a setting that took its place
_RENAMED: dict[str, dict[str, str]] = {
    "data": {"--source": "--data"},
    "eval": {"--max-length": "--length"},
    "swap": _ROUTER,
    "upcycle": {"--text": "--data", "--sequence-length": "--length", **_ROUTER},
}


def with_new_names(args: Sequence[str]) -> list[str]:
    """The arguments of ``l2r`` as the commands of today spell them."""
    command, *options = args or [""]
    if command == "swap" and "--families" in options:
        return ["families", *(option for option in options if option != "--families")]
    renamed = _RENAMED.get(command, {})
    kept, changes = [], []
    given = iter(options)
    for option in given:
        name, equals, value = option.partition("=")
        new = renamed.get(name, name)
        if "{}" not in new:
            kept.append(f"{new}{equals}{value}")
            continue
        setting = value if equals else next(given, None)
        if setting is None:
            kept.append(option)  # without its value: no such option
        else:
            changes.append(new.format(setting))  # behind the checkpoint
    return [*args[:1], *kept, *changes]

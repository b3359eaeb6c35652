"""Router options shared by commands: ``--router NAME --rank 2 --heads 16 --option beta=0.5``."""

from collections.abc import Sequence

from l2r.routers import RouterConfig, make_config


def router_config(
    kind: str, rank: int | None, heads: int | None, options: Sequence[str]
) -> RouterConfig:
    """Configuration from a name, the two common numbers and further ``name=value`` options.

    Raises ValueError for unknown names, fields and values.
    """
    import yaml

    values = {
        name: value for name, value in (("rank", rank), ("heads", heads)) if value is not None
    }
    for option in options:
        name, equals, text = option.partition("=")
        if not equals or not name:
            raise ValueError(f"option must be written as name=value; got {option!r}")
        values[name] = yaml.safe_load(text)
    return make_config(kind, **values)


def layer_list(text: str | None) -> list[int] | None:
    """Layer indices from ``"0,3,5"``; None for ``all`` or nothing. Raises ValueError otherwise."""
    if text is None or text == "all":
        return None
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"layers must be 'all' or indices like 0,3,5; got {text!r}") from None

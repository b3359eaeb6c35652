"""Settings that recipes, routers and the Trainer share: names, and fields that others rule out."""

import dataclasses
from collections.abc import Mapping
from typing import Literal

from l2r.errors import InputError

PAPER_ROUTERS = {
    "linear": "Linear",
    "linear_sips": "Linear (SIPS)",
    "xmoe": "X-MoE",
    "l2r_dot": "L2R (Dot)",
    "l2r_cosine": "L2R (Cosine)",
    "l2r_sips": "L2R (SIPS)",
}


BalanceVariant = Literal["paper", "olmoe", "hf", "tutel"]
ZVariant = Literal["paper", "olmoe", "centered"]
BalanceScope = Literal["microbatch", "step", "sequence"]


@dataclasses.dataclass(frozen=True)
class OtherThan:
    """Every value but one, as the values in ``read_with``."""

    value: object

    def __contains__(self, value: object) -> bool:
        return value != self.value


# field -> {other field: its values with which the field is read}
ReadWith = Mapping[str, Mapping[str, tuple[object, ...] | OtherThan]]


def check_read(config: object, read_with: ReadWith, defaults: Mapping[str, object]) -> None:
    """Raise ValueError for a field that is set, but unused with the values of the other fields.

    ``defaults``: default of each field to check, by its name.
    """
    for field, conditions in read_with.items():
        if field not in defaults:
            continue
        for other, values in conditions.items():
            given, beside = getattr(config, field), getattr(config, other)
            if given != defaults[field] and beside not in values:
                if isinstance(values, OtherThan):
                    wanted = f" other than {values.value!r}"
                else:
                    wanted = "=" + " or ".join(map(repr, values))
                raise InputError(
                    f"{field} is read only with {other}{wanted}; "
                    f"got {field}={given!r} with {other}={beside!r}; leave {field} out"
                )

"""Variants of the auxiliary losses, by name: l2r.functional.losses says what each computes."""

from typing import Literal

BalanceVariant = Literal["paper", "olmoe", "hf", "tutel"]
ZVariant = Literal["paper", "olmoe", "centered"]

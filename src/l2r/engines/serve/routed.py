"""The experts that the tokens of one answer took, as vLLM gives them.

Shape letters: T tokens of a forward, L layers with a router, K experts chosen per token.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from jaxtyping import Int
from torch import Tensor

from l2r.errors import InputError
from l2r.hf.routes import Choices, Fingerprint, all_layers, fingerprint_of, vllm_text
from l2r.routers.temporary import replaced


def routes_of(model: Any) -> Fingerprint | str:
    """Fingerprint with which a model's routes are written, or the reason why they cannot be."""
    try:
        fingerprint = fingerprint_of(model)
    except InputError as error:
        return str(error)
    if fingerprint.hidden_layers is None:
        return "the configuration of this model has no num_hidden_layers"
    return fingerprint


class RoutedTokens:
    """Experts of a sequence's tokens, by position; the first ``start`` are left out."""

    def __init__(self, fingerprint: Fingerprint, start: int) -> None:
        self._fingerprint, self._start = fingerprint, start
        self._parts: list[tuple[int, np.ndarray]] = []

    def put(self, first: int, experts: Int[Tensor, "T L K"]) -> None:
        """Experts of the tokens from position ``first`` on; what was there is replaced."""
        self._parts.append((first, experts.cpu().numpy()))

    def text(self, tokens: int) -> str:
        """``routed_experts`` when the sequence has ``tokens``, of which the last is not forwarded.

        Raises ValueError where another was not forwarded either.
        """
        f = self._fingerprint
        kind = np.uint8 if f.num_experts <= 256 else np.uint16
        experts = np.zeros((tokens - 1, len(f.layers), f.top_k), kind)
        mask = np.zeros(tokens - 1, bool)
        for first, part in self._parts:
            experts[first : first + len(part)] = part[: tokens - 1 - first]
            mask[first : first + len(part)] = True
        if not mask[self._start :].all():
            missing = self._start + int(np.argmin(mask[self._start :]))
            raise InputError(f"the experts of token {missing} were not recorded")
        return vllm_text(all_layers(experts[self._start :], f))


@contextmanager
def noting(model: Any) -> Iterator[Choices]:
    """Record the routers' choices in the next forward; call ``begin`` before each further one."""
    choices = Choices(model)
    with replaced(choices.forwards()):
        choices.begin()
        yield choices

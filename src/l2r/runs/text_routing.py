"""Which tokens of a text go to which expert: the file text.npz."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from jaxtyping import Float, Integer, Shaped

from l2r.runs.arrays import Arrays


@dataclass(frozen=True)
class TextRouting(Arrays):
    """Routing of B x S tokens in L layers of N experts; P x C of them are kept one by one.

    pieces: text of every distinct token. tokens: all of the text as positions in pieces; domain:
    of each row, a position in domains. shown: the rows of which the first C tokens are kept,
    those of one domain after another.

    Of each such token: experts, the heaviest first; weights, what their outputs are multiplied by;
    margin, the gap between the two largest logits; entropy of softmax(logits) over log N; radius,
    within which no change of the router's input changes the first expert, NaN without a proof
    (remarks has a line per layer that says why, or is empty).

    Of each expert, over all of the text: contexts, the tokens (b S + s) that it weighs most, and
    their weights; vocabulary, the pieces of which the largest shares come to it, and how many of
    each did. -1 where there are fewer. Shares are ranked by the low end of Wilson's 95% interval.
    """

    what: ClassVar = "text routing"

    layers: Shaped[np.ndarray, " L"]
    remarks: Shaped[np.ndarray, " L"]
    domains: Shaped[np.ndarray, " G"]
    pieces: Shaped[np.ndarray, " V"]
    tokens: Integer[np.ndarray, "B S"]
    domain: Integer[np.ndarray, " B"]
    shown: Integer[np.ndarray, " P"]
    experts: Integer[np.ndarray, "L P C K"]
    weights: Float[np.ndarray, "L P C K"]
    margin: Float[np.ndarray, "L P C"]
    entropy: Float[np.ndarray, "L P C"]
    radius: Float[np.ndarray, "L P C"]
    contexts: Integer[np.ndarray, "L N M"]
    context_weights: Float[np.ndarray, "L N M"]
    vocabulary: Integer[np.ndarray, "L N W"]
    vocabulary_counts: Integer[np.ndarray, "L N W"]

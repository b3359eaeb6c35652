"""Two runs of the same tokens, decision by decision: the file mismatch.npz, and its sums."""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar

import numpy as np
from jaxtyping import Bool, Float, Integer, Shaped

from l2r.files.arrays import Arrays

ARITHMETICS = ("bf16", "int8", "fp8")  # in which the same weights are run again
NO_STATEMENT = -1  # of a decision that is neither certified nor not
LARGE = 0.05  # change of a log-probability that counts as large
_PARTS = 8  # of the margins and of the positions
_MARKS = "number", "start of a word", "inside of a word", "white space", "punctuation and signs"


@dataclass(frozen=True)
class Mismatch(Arrays):
    """T tokens of S sequences, one after another, in L layers that choose K experts a token.

    layers: their indices. remarks: why a layer has no certificate, or empty. lengths: tokens of
    each sequence; domain: its position in domains. pieces: text of every distinct token; tokens:
    positions in pieces.

    Of each decision: experts of the reference and of the other (-1 where a token has no route);
    gap, the smallest logit of the chosen experts minus the largest of the others, in the
    reference; moved, |change| / |input| of the router's input, NaN where it is not known;
    certified, 1, 0 or NO_STATEMENT.

    Of each token: own and replayed, change of the next token's log-probability with each side's
    own experts and with the same experts on both sides; kl_own and kl_replayed, KL(reference,
    other) in nats. NaN where there is none, as at the end of a sequence.
    """

    what: ClassVar = "mismatch"

    layers: Integer[np.ndarray, " L"]
    remarks: Shaped[np.ndarray, " L"]
    lengths: Integer[np.ndarray, " S"]
    domain: Integer[np.ndarray, " S"]
    domains: Shaped[np.ndarray, " G"]
    pieces: Shaped[np.ndarray, " V"]
    tokens: Integer[np.ndarray, " T"]
    experts: Integer[np.ndarray, "L T K"]
    other_experts: Integer[np.ndarray, "L T K"]
    gap: Float[np.ndarray, "L T"]
    moved: Float[np.ndarray, "L T"]
    certified: Integer[np.ndarray, "L T"]
    own: Float[np.ndarray, " T"]
    replayed: Float[np.ndarray, " T"]
    kl_own: Float[np.ndarray, " T"]
    kl_replayed: Float[np.ndarray, " T"]

    @property
    def compared(self) -> Bool[np.ndarray, " T"]:
        """Tokens that have a route on both sides."""
        return np.asarray((self.other_experts >= 0).all(axis=(0, 2)))

    @property
    def changed(self) -> Bool[np.ndarray, "L T"]:
        """Decisions with another set of experts."""
        pairs = np.not_equal(np.sort(self.experts, axis=-1), np.sort(self.other_experts, axis=-1))
        changed: np.ndarray = np.any(pairs, axis=-1)
        return np.logical_and(changed, self.compared)

    @property
    def kept(self) -> Float[np.ndarray, "L T"]:
        """Share of a token's K experts that both sides take; of no meaning where not compared."""
        pairs = self.experts[..., :, None] == self.other_experts[..., None, :]
        share: np.ndarray = pairs.any(axis=-1).mean(axis=-1)
        return share

    @property
    def position(self) -> Integer[np.ndarray, " T"]:
        """Place of each token in its sequence, from 0."""
        starts = np.cumsum(self.lengths) - self.lengths
        return np.arange(len(self.tokens)) - np.repeat(starts, self.lengths)

    def by_layer(self) -> list[dict[str, Any]]:
        """Per layer: share changed and certified, certified and changed, median change of input.

        kept: mean share of a token's K experts that the other side takes too.
        """
        rows = []
        compared, changed, kept = self.compared, self.changed, self.kept
        for n, layer in enumerate(self.layers.tolist()):
            held = self.certified[n] == 1
            certified = bool((self.certified[n] != NO_STATEMENT).any())
            rows.append(
                {
                    "layer": layer,
                    "decisions": int(compared.sum()),
                    "changed": _share(changed[n], compared),
                    "kept": _mean(kept[n][compared]),
                    "input_change": _median(self.moved[n]),
                    "certified": _share(held, compared) if certified else None,
                    "certified_changed": int((held & changed[n]).sum()) if certified else None,
                }
            )
        return rows

    def totals(self) -> dict[str, Any]:
        """Over all layers and tokens; None where nothing is known."""
        compared, changed = self.compared, self.changed
        stated = np.not_equal(self.certified, NO_STATEMENT) & compared
        held = np.equal(self.certified, 1) & compared
        return {
            "tokens": int(compared.sum()),
            "layers": len(self.layers),
            "decisions_changed": _share(changed, np.broadcast_to(compared, changed.shape)),
            "experts_kept": _mean(self.kept[:, compared]),
            "tokens_changed": _share(changed.any(axis=0), compared),
            "certified": _share(held, stated) if stated.any() else None,
            "certified_decisions": int(held.sum()),
            "certified_changed": int((held & changed).sum()),
        }

    def costs(self) -> dict[str, dict[str, float | None]]:
        """Costs of own and of replayed routes: KL, largest and mean change, share above LARGE.

        loss: what the mean cross-entropy of the next token rises by, in nats.
        """
        costs = {}
        for name in ("own", "replayed"):
            change, kl = getattr(self, name), getattr(self, f"kl_{name}")
            change, kl = change[~np.isnan(change)], kl[~np.isnan(kl)]
            size, rise = np.abs(change), _mean(change)
            costs[name] = {
                "loss": None if rise is None else -rise,
                "kl": _mean(kl),
                "largest": float(size.max()) if len(size) else None,
                "mean": _mean(size),
                "large": float((size > LARGE).mean()) if len(size) else None,
            }
        return costs

    def by_margin(self) -> list[dict[str, Any]]:
        """Decisions in eighths by their gap: range of the gap, share changed, share certified.

        Without those of layers that use all their experts: nothing is decided, the gap is infinite.
        """
        where = np.broadcast_to(self.compared, self.gap.shape) & np.isfinite(self.gap)
        gap, changed = self.gap[where], self.changed[where]
        certified = self.certified[where]
        rows = []
        for part in np.array_split(np.argsort(gap, kind="stable"), _PARTS):
            if not len(part):
                continue
            stated = certified[part] != NO_STATEMENT
            held = float((certified[part] == 1)[stated].mean()) if stated.any() else None
            row = {"from": float(gap[part[0]]), "to": float(gap[part[-1]])}
            rows.append({**row, "changed": float(changed[part].mean()), "certified": held})
        return rows

    def by_position(self) -> list[dict[str, Any]]:
        """Tokens in eighths of the longest sequence: share changed in some layer, mean change."""
        longest = int(self.lengths.max(initial=0))
        edges = np.unique(np.linspace(0, longest, min(_PARTS, max(1, longest)) + 1).astype(int))
        pairs = pairwise(edges)
        groups = [(f"{a} to {b - 1}", (self.position >= a) & (self.position < b)) for a, b in pairs]
        return [self._tokens(name, where) for name, where in groups]

    def by_kind(self) -> list[dict[str, Any]]:
        """Count changed tokens by kind of token."""
        kinds = np.array([kind_of(str(piece)) for piece in self.pieces])[self.tokens]
        rows = [self._tokens(kind, kinds == kind) for kind in _MARKS]
        return [row for row in rows if row["tokens"]]

    def summary(self) -> dict[str, Any]:
        """All sums, for JSON."""
        return {
            **self.totals(),
            "log_probability": self.costs(),
            "layer": self.by_layer(),
            "margin": self.by_margin(),
            "position": self.by_position(),
            "kind": self.by_kind(),
        }

    def _tokens(self, name: str, where: Bool[np.ndarray, " T"]) -> dict[str, Any]:
        where = where & self.compared
        size = np.abs(self.own[where])
        size = size[~np.isnan(size)]
        return {
            "tokens_of": name,
            "tokens": int(where.sum()),
            "changed": _share(self.changed.any(axis=0), where),
            "mean": _mean(size),
        }


def kind_of(piece: str) -> str:
    """Kind of a token, by its text with the space before a word."""
    text = piece.strip()
    if not text:
        return "white space"
    if any(letter.isdigit() for letter in text) and not any(map(str.isalpha, text)):
        return "number"
    if text[0].isalpha():
        return "start of a word" if piece[0].isspace() else "inside of a word"
    return "punctuation and signs"


def _share(hits: Any, of: Any) -> float | None:
    count = int(of.sum())
    return float((hits & of).sum() / count) if count else None


def _mean(values: np.ndarray) -> float | None:
    return float(values.mean(dtype=np.float64)) if values.size else None


def _median(values: Float[np.ndarray, " T"]) -> float | None:
    numbers = values[~np.isnan(values)]
    return float(np.median(numbers)) if len(numbers) else None

"""Fingerprint of the model and the tokenizer that a route belongs to."""

import hashlib
import json
from dataclasses import asdict, dataclass, fields
from typing import Any

from l2r.errors import InputError
from l2r.transformers_hook import stock_type


@dataclass(frozen=True, kw_only=True)
class Fingerprint:
    """Sizes that routes and a model must share; a swapped model is of its stock model's type.

    layers: indices of the decoder layers that have a router. hidden_layers: all layers, those
    without a router too. model_type: as in the configuration. tokenizer: digest of its vocabulary.
    The last three are None where nobody said; None fits everything.

    Raises ValueError for sizes that no model has.
    """

    num_experts: int
    top_k: int
    layers: tuple[int, ...]
    hidden_layers: int | None = None
    model_type: str | None = None
    tokenizer: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "layers", tuple(self.layers))
        sizes = (self.num_experts, self.top_k, *self.layers, self.hidden_layers or 0)
        if any(type(size) is not int for size in sizes):
            raise InputError(f"sizes of routes must be whole numbers; got {self}")
        if not 1 <= self.num_experts <= 1 << 16:
            raise InputError(
                f"num_experts must be between 1 and 65536; got num_experts={self.num_experts}"
            )
        if not 1 <= self.top_k <= self.num_experts:
            raise InputError(
                f"top_k must be between 1 and num_experts; got top_k={self.top_k}, "
                f"num_experts={self.num_experts}"
            )
        rising = all(a < b for a, b in zip(self.layers, self.layers[1:], strict=False))
        if not self.layers or not rising or self.layers[0] < 0:
            raise InputError(f"layers must be indices that rise, one at least; got {self.layers}")
        if self.hidden_layers is not None and self.layers[-1] >= self.hidden_layers:
            raise InputError(
                f"layers must lie below hidden_layers; got layer {self.layers[-1]}, "
                f"hidden_layers={self.hidden_layers}"
            )
        if any(text is not None and type(text) is not str for text in self._texts()):
            raise InputError(f"model_type and tokenizer must be text or None; got {self}")

    def check(self, model: "Fingerprint") -> None:
        """Raise ValueError with the first field in which routes and a model differ."""
        for field in fields(self):
            ours, theirs = getattr(self, field.name), getattr(model, field.name)
            if None in (ours, theirs):
                continue
            if _compared(field.name, ours) != _compared(field.name, theirs):
                raise InputError(
                    f"routes and model must have the same {field.name}; "
                    f"got {ours} in the routes and {theirs} in the model"
                )

    def to_json(self) -> str:
        """JSON object of the fields."""
        return json.dumps(asdict(self))

    @classmethod
    def from_values(cls, values: dict[str, Any]) -> "Fingerprint":
        """Read what ``to_json`` wrote. Raises ValueError for other fields or values."""
        names = {field.name for field in fields(cls)}
        if set(values) != names or not isinstance(values["layers"], list):
            raise InputError(f"a fingerprint must have the fields {', '.join(sorted(names))}")
        return cls(**{**values, "layers": tuple(values["layers"])})

    def _texts(self) -> tuple[Any, Any]:
        return self.model_type, self.tokenizer


def _compared(name: str, value: Any) -> Any:
    """Return a field to compare: of a model type the stock one, since a swap keeps the experts."""
    return stock_type(value) if name == "model_type" else value


def tokenizer_digest(tokenizer: Any) -> str | None:
    """Digest of a tokenizer's vocabulary, equal wherever the same tokens have the same numbers.

    ``tokenizer`` has ``get_vocab()``, as those of transformers and tokenizers do, or is None.
    """
    if tokenizer is None:
        return None
    vocabulary = sorted((int(number), token) for token, number in tokenizer.get_vocab().items())
    return hashlib.sha256(json.dumps(vocabulary).encode()).hexdigest()[:16]

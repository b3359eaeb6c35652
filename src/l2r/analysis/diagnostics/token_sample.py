"""A uniform sample of fixed size from a stream of tokens, the same tokens in every layer."""

import torch
import torch.distributed as dist
from torch import Tensor

from l2r.errors import InputError

Fields = dict[str, Tensor]


class TokenSample:
    """Keeps ``size`` tokens of a stream, each with equal chance, in memory that never grows.

    Every token draws a key in [0, 1) and the smallest keys stay. Samples with one seed that see
    streams of one length keep the same positions; samples of several ranks merge exactly.
    """

    def __init__(self, size: int, seed: int = 0) -> None:
        if size < 1:
            raise InputError(f"sample must be >= 1 token; got {size}")
        self.size = size
        self.keys = torch.empty(0, dtype=torch.float64)
        self.fields: Fields = {}
        self._generator = torch.Generator().manual_seed(seed)

    def add(self, fields: Fields) -> None:
        """Offer tokens: tensors [T, ...] of one length, by name."""
        tokens = len(next(iter(fields.values())))
        keys = torch.rand(tokens, dtype=torch.float64, generator=self._generator)
        limit = self.keys.max() if len(self.keys) == self.size else torch.inf
        rows = (keys < limit).nonzero()[:, 0]
        if len(rows) > self.size:
            rows = rows[keys[rows].topk(self.size, largest=False).indices]
        if len(rows) > 0:
            sampled = {name: value[rows.to(value.device)].cpu() for name, value in fields.items()}
            self._merge(keys[rows], sampled)

    def gather(self) -> Fields:
        """The sample, over all ranks when torch.distributed runs; ordered by key."""
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            parts: list[tuple[Tensor, Fields]] = [(self.keys, self.fields)] * dist.get_world_size()
            dist.all_gather_object(parts, (self.keys, self.fields))
            merged = TokenSample(self.size)
            for keys, fields in parts:
                if len(keys) > 0:
                    merged._merge(keys, fields)
            return merged.fields
        return self.fields

    def _merge(self, keys: Tensor, fields: Fields) -> None:
        all_keys = torch.cat([self.keys, keys])
        order = all_keys.argsort()[: self.size]
        self.keys = all_keys[order]
        for name, value in fields.items():
            both = torch.cat([self.fields[name], value]) if name in self.fields else value
            self.fields[name] = both[order].clone()

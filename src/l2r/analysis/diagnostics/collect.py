"""Collect routing statistics of any model while it runs: streaming, in bounded memory.

Works on models with routers of ours and on Hugging Face MoE models whose routers return
(logits, weights, indices). Every layer is reduced to sums and a sample of tokens (the same ones in
every layer) while the model runs, so nothing of a batch outlives the batch.

Shape letters: T tokens, N experts, K experts chosen per token, B sequences or images, S length.
"""

import dataclasses
from collections.abc import Callable, Iterable, Sequence

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor, nn

from l2r.analysis.certificates.routing_map import scoring_anchors
from l2r.analysis.diagnostics import streaming_sums as sums
from l2r.analysis.diagnostics.data_pass import BatchReading, DataBatch, RouterReducer, Run, read
from l2r.errors import InputError
from l2r.functional.selection import first_choice
from l2r.routers import L2RRouter, Router, RouterOutput
from l2r.routers.observe import block_bias, find_routers
from l2r.routers.offload import materialized

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
        """Return the sample ordered by key, over all ranks when torch.distributed runs."""
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


@dataclasses.dataclass
class LayerRecord:
    """Record of one router: sums by metric (streaming_sums.py) and a sample of its tokens.

    ``sample`` holds x [S, D], first [S] (expert), and domain [S] where batches name one, all on
    the CPU. more: further arguments of the router, a selection bias [N] of its block or none.
    by_rows: whether the block passes [B, S, D], which some routers insist on.
    """

    name: str
    router: nn.Module
    num_experts: int
    sums: dict[str, sums.Sums]
    sample: Fields
    more: tuple[Tensor, ...] = ()
    by_rows: bool = False

    def inputs(self) -> Tensor:
        """Router inputs [S, D] of the sample, on the device of the router."""
        return self.sample["x"].to(next(self.router.parameters()).device)

    def as_passed(self) -> Tensor:
        """Reshape these inputs to the shape in which the router takes them, [S, D] or [1, S, D]."""
        return self.inputs()[None] if self.by_rows else self.inputs()


def collect_records(
    model: nn.Module,
    batches: Iterable[DataBatch],
    *,
    domains: Sequence[str] = (),
    threshold: float = 0.2,
    sample: int = 2048,
    seed: int = 0,
    run: Run | None = None,
    reducers: Sequence[RouterReducer] = (),
    report: Callable[[int], None] = lambda batches_done: None,
) -> list[LayerRecord]:
    """Run ``model`` on ``batches`` and return a record per layer, in the order of the model.

    Batches and ``run`` are those of ``read``; ``domain`` holds positions in ``domains``.
    ``reducers`` look at the same routers in the same pass (choices, text), each on its own rank.
    With torch.distributed every rank passes its own batches and all get the statistics of all.

    Raises ValueError for a model without routers or when no tokens were seen.
    """
    records = RecordCollector(model, domains=domains, threshold=threshold, sample=sample, seed=seed)
    read(model, batches, [records, *reducers], run=run, report=report)
    return records.result()


class RecordCollector(RouterReducer):
    """Sums and a sample of every router of a model; ``result`` gives the records."""

    def __init__(
        self, model: nn.Module, *, domains: Sequence[str], threshold: float, sample: int, seed: int
    ) -> None:
        rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
        self._domains = len(domains)
        self._layers = {
            name: _Layer(
                router,
                TokenSample(sample, seed + rank),
                len(domains),
                threshold,
                block_bias(model, name),
            )
            for name, router in find_routers(model).items()
        }

    def begin(self, reading: BatchReading) -> None:
        """Note which tokens of the batch count, and their domains."""
        for layer in self._layers.values():
            layer.mask = reading.mask
            layer.domain = reading.domain if self._domains else None

    def see(self, x: Tensor, output: RouterOutput, where: str) -> None:
        """Add the tokens of one call to the sums and the sample of its layer."""
        layer = self._layers[where]
        layer.by_rows = x.dim() == 3
        layer.add(x.reshape(-1, x.shape[-1]), output)

    def result(self) -> list[LayerRecord]:
        """Statistics over all batches and ranks."""
        return [layer.record(name) for name, layer in self._layers.items()]


class _Layer:
    """Running statistics of one router."""

    def __init__(
        self,
        router: nn.Module,
        sample: TokenSample,
        domains: int,
        threshold: float,
        more: tuple[Tensor, ...],
    ) -> None:
        self.router, self.more = materialized(router), more
        self.sample = sample
        self.domains = domains
        self.threshold = threshold
        self.mask: Tensor | None = None
        self.domain: Tensor | None = None
        self.by_rows = False
        self.rows = 0
        self.sums: dict[str, sums.Sums] = {}

    def add(self, x: Float[Tensor, "T D"], output: RouterOutput) -> None:
        """Add the tokens of one call that count."""
        logits, weights, indices = output
        domain, row = self._domain_and_row(len(x))
        keep = _token_mask(self.mask, len(x))
        if keep is not None:
            x, logits, weights, indices = (v[keep] for v in (x, logits, weights, indices))
            if domain is not None and row is not None:
                domain, row = domain[keep], row[keep]
        num_experts = logits.shape[1]
        if len(x) == 0:
            return
        self._add("margin", sums.margin_sums(logits, self.threshold))
        self._add("usage", sums.usage_sums(indices, weights, num_experts))
        query = self.router.query(x) if isinstance(self.router, Router) else x
        self._add("cosine", sums.cosine_sums(query))
        if isinstance(self.router, L2RRouter):
            # phi(|q|) > 0 scales all anchors of a token alike, so m . q ranks them.
            scores = torch.einsum("tr,nhr->tnh", query.double(), scoring_anchors(self.router))
            self._add("anchors", sums.anchor_sums(scores, indices))
        fields = {"x": x, "first": first_choice(weights, indices)}
        if domain is not None and row is not None:
            domain, row = domain.to(indices.device), row.to(indices.device)
            joint = sums.domain_sums(indices, domain, row, num_experts, self.domains)
            self._add("domain", joint)
            fields["domain"] = domain
        self.sample.add(fields)

    def record(self, name: str) -> LayerRecord:
        """Statistics over all batches and ranks."""
        reduced = sums.all_reduce(self.sums)
        if not reduced:
            raise InputError(f"router {name} saw no tokens; is the data empty or all padding?")
        num_experts = len(reduced["usage"]["topk"])  # of a rank without tokens, too
        sample = self.sample.gather()
        if not sample["x"].isfinite().all(dim=1).any():
            raise InputError(
                f"router {name} gets no finite input on this data; weights before it are too large "
                "for their dtype"
            )
        return LayerRecord(name, self.router, num_experts, reduced, sample, self.more, self.by_rows)

    def _domain_and_row(self, tokens: int) -> tuple[Tensor | None, Tensor | None]:
        """Domain of each token, and the number of its sequence or image in this layer."""
        if self.domain is None:
            return None, None
        count = len(self.domain)
        row = torch.arange(self.rows, self.rows + count, device=self.domain.device)
        self.rows += count
        each = tokens // count
        return self.domain.repeat_interleave(each), row.repeat_interleave(each)

    def _add(self, part: str, batch: sums.Sums) -> None:
        sums.add(self.sums.setdefault(part, {}), batch)


def _token_mask(mask: Tensor | None, tokens: int) -> Tensor | None:
    """Mask of the router's tokens, or None where all count or the mask is of something else."""
    if mask is None or mask.numel() != tokens or bool(mask.all()):
        return None
    return mask.reshape(-1).bool()

"""The model that is checked, a batch, and the forward and backward passes that checks share.

Every pass runs once, when the first check asks for it, in evaluation mode; neither weights nor
gradients of the model change.

Shape letters: B sequences or images, S length, T tokens, N experts, K experts chosen per token.
"""

import inspect
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from l2r.analysis.diagnostics.checks.own_loss import Asked, OwnLoss, own_loss_of
from l2r.errors import InputError
from l2r.functional import load_balancing_loss
from l2r.hf.routes import unwrapped_model
from l2r.hf.swap import Site, running_sites, trainable_parameters
from l2r.routers import RouterOutput
from l2r.routers.observe import evaluating, watched
from l2r.routers.offload import device_of, materialized

_DRAWN = (2, 64)  # sequences and their length, where no batch is given
_SMALL = 64  # longest sequence of the passes that need no text


@dataclass(frozen=True)
class Pass:
    """Output of a forward pass, and of every router by its path."""

    output: Any
    routed: dict[str, RouterOutput]

    def logits(self) -> list[Tensor]:
        """Logits [T, N] of every router."""
        return [logits for logits, _, _ in self.routed.values()]


class Subject:
    """A model with routers and what its checks need.

    batch: inputs by name, such as ``input_ids`` [B, S] and ``attention_mask`` [B, S], or
    ``pixel_values``; drawn where it is None. balance, z: weights of the router losses that the
    training adds to the model's own loss.
    """

    def __init__(
        self,
        model: nn.Module,
        batch: Mapping[str, Tensor] | None = None,
        *,
        balance: float = 0.0,
        z: float = 0.0,
    ) -> None:
        self.model: Any = unwrapped_model(model)
        self.sites = running_sites(self.model)
        config: Any = getattr(self.model, "config", None)
        self.config: Any = (
            config.get_text_config() if hasattr(config, "get_text_config") else config
        )
        self.balance, self.z = balance, z
        self.is_drawn = batch is None
        inputs = self._draw() if batch is None else batch
        device = device_of(self.model)
        self.batch = {
            name: value.to(device)
            for name, value in inputs.items()
            if isinstance(value, Tensor) and name != "labels"
        }

    @property
    def reads_text(self) -> bool:
        """Tell whether the batch holds token ids."""
        return "input_ids" in self.batch

    @cached_property
    def own_loss(self) -> OwnLoss | None:
        """The balance loss that the model adds when its configuration says so, None without one.

        The model is asked, since wrappers differ in where they keep its weight: three passes over
        a few tokens, with ``output_router_logits`` as it is, off and on. What its attributes say
        counts for images and for a model that does not run.
        """
        asked: list[Asked] = []
        if self.reads_text:
            with suppress(Exception):  # of any kind, from the code of any model
                asked = [self._asked(logits) for logits in (None, False, True)]
        return own_loss_of(self.model, self.config, asked)

    @property
    def loss_is_on(self) -> bool:
        """Tell whether some balance loss or z-loss trains the routers."""
        own = self.own_loss is not None and self.own_loss.is_on
        return own or self.balance > 0 or self.z > 0

    @property
    def is_offloaded(self) -> bool:
        """Tell whether accelerate keeps some weights elsewhere until they run."""
        return any(parameter.is_meta for parameter in self.model.parameters())

    def tensors(self, site: Site) -> dict[str, Tensor]:
        """Parameters and buffers of a router by name, as they are when it runs."""
        router = materialized(site.router)
        return {**dict(router.named_parameters()), **dict(router.named_buffers())}

    @cached_property
    def plain(self) -> Pass:
        """The batch as it is, with labels where it holds token ids."""
        return self._forward(self.batch, labels=self.labels(self.batch))

    @cached_property
    def padded(self) -> tuple[Tensor, Pass, Pass]:
        """Mask [2, S], and two passes that differ only in the tokens outside of it, in row 0."""
        ids = self.batch["input_ids"][:1, :_SMALL].repeat(2, 1)
        mask = torch.ones_like(ids)
        mask[0, : ids.shape[1] // 2] = 0
        other = torch.where(mask.bool(), ids, (ids + 1) % self.config.vocab_size)
        first, second = ({"input_ids": i, "attention_mask": mask} for i in (ids, other))
        labels = self.labels(first)
        return mask, self._forward(first, labels=labels), self._forward(second, labels=labels)

    @cached_property
    def gradients(self) -> dict[str, Tensor | None]:
        """Gradient of the task loss alone for every router parameter that trains, by its path."""
        wanted, small = self._trained(), self._small()
        off = None if self.own_loss is None else False
        with torch.enable_grad(), evaluating(self.model):
            output = self._call(small, self.labels(small), router_logits=off)
            loss = (
                output["loss"] if self.reads_text else output["logits"].float().logsumexp(-1).sum()
            )
            grads = torch.autograd.grad(loss, list(wanted.values()), allow_unused=True)
        return dict(zip(wanted, grads, strict=True))

    @cached_property
    def balance_gradients(self) -> dict[str, Tensor | None]:
        """Gradient of the balance loss alone for every router parameter that trains, by its path.

        Of the model's own, or else of what the training would compute from the routers' logits.
        """
        wanted, small = self._trained(), self._small()
        seen: list[RouterOutput] = []
        routers = {site.path: site.router for site in self.sites}
        on = None if self.own_loss is None else True
        with torch.enable_grad(), evaluating(self.model):
            with watched(routers, lambda x, output, path: seen.append(output)):
                output = self._call(small, self.labels(small), router_logits=on)
            loss = getattr(output, "aux_loss", None) if on else None
            if not isinstance(loss, Tensor):
                loss = load_balancing_loss(
                    [each.logits for each in seen], [each.indices for each in seen], variant="hf"
                )
            grads: Sequence[Tensor | None] = [None] * len(wanted)
            if loss.requires_grad:
                grads = torch.autograd.grad(loss, list(wanted.values()), allow_unused=True)
        return dict(zip(wanted, grads, strict=True))

    def weights_of_gradients(self, site: Site) -> Tensor:
        """Weights [B, S, K] that a router gave the tokens whose gradients are taken."""
        weights = self.plain.routed[site.path].weights
        rows = len(next(iter(self.batch.values())))
        return weights.view(rows, -1, weights.shape[1])[:2, :_SMALL]

    def labels(self, batch: Mapping[str, Tensor]) -> Tensor | None:
        """Token ids, -100 outside of the mask; None for images."""
        if "input_ids" not in batch:
            return None
        ids, mask = batch["input_ids"], batch.get("attention_mask")
        return ids if mask is None or mask.dim() != 2 else ids.masked_fill(mask == 0, -100)

    def _forward(self, batch: Mapping[str, Tensor], labels: Tensor | None) -> Pass:
        seen: dict[str, RouterOutput] = {}

        def keep(x: Tensor, output: RouterOutput, path: str) -> None:
            seen[path] = output

        routers = {site.path: site.router for site in self.sites}
        with torch.no_grad(), evaluating(self.model), watched(routers, keep):
            on = None if self.own_loss is None else True
            output = self._call(batch, labels, router_logits=on)
        return Pass(output, seen)

    def _asked(self, router_logits: bool | None) -> Asked:
        """Ask the model for its balance loss of a few tokens, if any, and its whole loss."""
        small = self._small()
        with torch.no_grad(), evaluating(self.model):
            output = self._call(small, self.labels(small), router_logits=router_logits)
        aux = getattr(output, "aux_loss", None)
        return Asked(None if aux is None else float(aux), float(output["loss"]))

    def _trained(self) -> dict[str, nn.Parameter]:
        """Router parameters that train, by their path."""
        return {
            f"{site.path}.{name}": parameter
            for site in self.sites
            for name, parameter in trainable_parameters(site).items()
            if parameter.requires_grad
        }

    def _small(self) -> dict[str, Tensor]:
        """Two rows of the batch, cut where they are text."""
        if not self.reads_text:
            return {name: value[:2] for name, value in self.batch.items()}
        return {name: v[:2, :_SMALL] for name, v in self.batch.items() if v.dim() == 2}

    def _call(
        self, batch: Mapping[str, Tensor], labels: Tensor | None, *, router_logits: bool | None
    ) -> Any:
        """``router_logits`` None: as the model is configured."""
        options: dict[str, Any] = {}
        if labels is not None:
            options = {"labels": labels, "use_cache": False}
        if router_logits is not None:
            options["output_router_logits"] = router_logits
        return self.model(**batch, **options)

    def _draw(self) -> dict[str, Tensor]:
        """Token ids, or pixels for a model without a vocabulary."""
        generator = torch.Generator().manual_seed(0)
        vocabulary = getattr(self.config, "vocab_size", None)
        if vocabulary is not None:
            return {"input_ids": torch.randint(vocabulary, _DRAWN, generator=generator)}
        size = getattr(self.config, "image_size", None)
        if size is None:
            forward = ", ".join(inspect.signature(self.model.forward).parameters)
            raise InputError(
                "batch must hold the model's inputs where its config has neither vocab_size nor "
                f"image_size; got batch=None, and forward takes {forward}"
            )
        high, wide = (size, size) if isinstance(size, int) else size
        channels = getattr(self.config, "num_channels", 3)
        return {"pixel_values": torch.randn(2, channels, high, wide, generator=generator)}

"""Upcycling: new routers fitted to the decisions of the old ones, then maybe everything trained.

Shape letters: B rows, S tokens per row.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn

from l2r.errors import InputError
from l2r.fitting.fit import FitProgress, FitReport, check_gradients, cosine, fit_sites, perplexity
from l2r.fitting.fit_options import FitOptions, JointOptions
from l2r.functional import load_balancing_loss, router_z_loss
from l2r.hf.swap import Site, new_router, record_swap, select_sites
from l2r.routers import Router, RouterConfig, capture, constrain
from l2r.routers.observe import evaluating
from l2r.text import token_losses


def upcycle(
    model: Any,
    config: RouterConfig,
    batches: Sequence[Int[Tensor, "_ S"]],
    held_out: Sequence[Int[Tensor, "_ S"]],
    *,
    options: FitOptions | None = None,
    joint: JointOptions | None = None,
    layers: Sequence[int] | None = None,
    selection: str = "family",
    report: FitProgress = lambda stage, done, total, note="": None,
) -> FitReport:
    """Replace the routers of ``model`` in place by ones fitted to the old ones' decisions.

    ``batches`` are token ids to fit and train on, ``held_out`` others to measure on.
    ``options.updates=0`` leaves the new routers as they are drawn: copying nothing. Modules are in
    training mode afterwards where they were before.
    Raises ValueError for empty batches, where gradients are off, for joint training of quantized
    weights, and as ``swap_routers`` does.
    """
    joint = joint or JointOptions()
    if joint.steps:
        check_gradients()
        _check_weights(model)
    sites = select_sites(model, layers)
    students = [_start(model, site, new_router(site, config, selection)) for site in sites]
    with ExitStack() as stack:
        for module in (model, *students):
            stack.enter_context(evaluating(module))
        fitting = options or FitOptions()
        result = fit_sites(model, sites, students, batches, held_out, fitting, report)
        record_swap(model, config, sites, selection=selection)
        if joint.steps:
            train_jointly(model, batches, joint, report)
            result.perplexity["trained"] = perplexity(model, held_out)
    return result


def train_jointly(
    model: Any, batches: Sequence[Tensor], options: JointOptions, report: FitProgress
) -> None:
    """Train all weights for ``options.steps`` batches, with the paper's auxiliary losses.

    Weights of 16 bits are trained as fp32 copies, since most updates are smaller than a step of
    theirs, and return to their dtype at the end. Modes return, too; no gradient is left.
    """
    with evaluating(model), _wide_weights(model) as autocast:
        optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr, betas=(0.9, 0.95))
        schedule = cosine(optimizer, options.steps, warmup=options.steps // 10)
        model.train()
        for step in range(options.steps):
            with autocast, capture(model) as record:
                loss = token_losses(model, batches[step % len(batches)]).mean()
            logits, indices = record.logits(), record.indices()
            for weight, extra in (
                (options.balance, load_balancing_loss(logits, indices)),
                (options.z, router_z_loss(logits)),
            ):
                loss = loss + weight * extra.to(loss.device)  # of a model on several devices
            optimizer.zero_grad(set_to_none=True)
            torch.autograd.backward(loss)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            constrain(model)
            schedule.step()
            report("joint training", step + 1, options.steps)


def _check_weights(model: nn.Module) -> None:
    """Raise ValueError for weights of one byte, which hold codes or need scales, and offloaded."""
    for name, parameter in model.named_parameters():
        if parameter.is_meta:
            raise InputError(
                f"joint training changes all weights, which must be in memory; {name} is "
                "offloaded: train without it, or on devices that hold the model"
            )
        if parameter.dtype.itemsize < 2:
            raise InputError(
                f"joint training changes all weights, which must be of 16 bits or more; {name} is "
                f"{parameter.dtype}: dequantize the model"
            )


@contextmanager
def _wide_weights(model: nn.Module) -> Iterator[AbstractContextManager[Any]]:
    """fp32 weights meanwhile; gives the autocast that runs the products of a bf16 model in bf16.

    An fp16 model computes in fp32, because its gradients would underflow without scaling.
    """
    dtypes = {parameter: parameter.dtype for parameter in model.parameters()}
    device = next(iter(dtypes)).device.type
    bf16 = torch.bfloat16 in dtypes.values()
    autocast = torch.autocast(device, torch.bfloat16) if bf16 else nullcontext()
    for parameter in dtypes:
        parameter.data = parameter.data.float()
    try:
        yield autocast
    finally:
        for parameter, dtype in dtypes.items():
            parameter.grad = None
            parameter.data = parameter.data.to(dtype)


def _start(model: nn.Module, site: Site, router: Router) -> Router:
    """Start a mixture of routers from the attention heads of its layer, as its source does."""
    layer = model.get_submodule(site.path.rpartition(".")[0].rpartition(".")[0])
    attention = getattr(layer, "self_attn", None)
    query = getattr(attention, "q_proj", None)
    if isinstance(query, nn.Linear) and hasattr(router, "start_from_heads"):
        made: Any = router
        made.start_from_heads(query.weight.to(made.projection.weight.dtype))
    return router

"""Checks of the routers' weights by themselves: values, dtypes, quantization."""

import torch
from torch import Tensor

from l2r.analysis.diagnostics.checks.finding import Finding, fault, in_layers, ok, warning
from l2r.analysis.diagnostics.checks.subject import Subject
from l2r.hf.models import attach_router, packing
from l2r.hf.swap import Site, trainable_parameters, unfitted_sites
from l2r.routers import Router


def finite(subject: Subject) -> Finding:
    """NaN and infinity in weights and selection biases."""
    bad = {
        f"{site.path}.{name}"
        for site in subject.sites
        for name, tensor in subject.tensors(site).items()
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor.float()).all())
    }
    if bad:
        return fault(
            f"{len(bad)} router tensors hold NaN or infinity, first {min(bad)}",
            "load an earlier checkpoint",
        )
    return ok(f"the routers of {len(subject.sites)} layers hold finite numbers")


def dtype(subject: Subject) -> Finding:
    """Our routers in float32; a family's own in the dtype of its model."""
    ours = [site for site in subject.sites if isinstance(site.router, Router)]
    narrow = [site for site in ours if _narrow_dtype(site) is not None]
    if narrow:
        dtype = _narrow_dtype(narrow[0])
        return warning(
            f"l2r routers in {in_layers(narrow)} have {dtype} parameters, which small updates do "
            "not change",
            "call .float() on them, and cast a model before the swap, not after it",
        )
    model = _name(next(p for p in subject.model.parameters() if p.is_floating_point()).dtype)
    stock = [site for site in subject.sites if not isinstance(site.router, Router)]
    if not stock:
        return ok(f"float32 parameters, as l2r routers have; the model is {model}")
    found = {_name(t.dtype) for site in stock for t in _floats(site)}
    lower = [site for site in stock if any(_is_narrower(t, model) for t in _floats(site))]
    if lower:
        return warning(
            f"the family's own routers in {in_layers(lower)} are {', '.join(sorted(found))} inside "
            f"a {model} model",
            f"load the whole model in {model}",
        )
    return ok(f"the family's own routers are {', '.join(sorted(found))}; the model is {model}")


def quantized(subject: Subject) -> Finding:
    """Integers, 8-bit floats or a quantizer's tensors in a router."""
    kinds: dict[str, list[Site]] = {}
    for site in subject.sites:
        for parameter in site.router.parameters():
            kind = packing(parameter)
            if kind:
                kinds.setdefault(kind, []).append(site)
    if kinds:
        kind, sites = next(iter(kinds.items()))
        return fault(
            f"router weights in {in_layers(sites)} are quantized ({kind}); rounding changes which "
            "experts are chosen",
            "name the routers among the modules that the quantizer leaves alone "
            "(modules_to_not_convert, llm_int8_skip_modules)",
        )
    return ok("no router is quantized")


def trained(subject: Subject) -> Finding:
    """Routers that a swap drew and nothing trained, and routers that score all experts alike."""
    fit = "fit them (l2r.fit_routers, l2r swap --fit) or train the model"
    drawn = {id(router) for _, router in unfitted_sites(subject.model)}
    fresh = [s for s in subject.sites if id(s.router) in drawn and not _has_moved(subject, s)]
    if fresh:
        return warning(
            f"the routers in {in_layers(fresh)} were drawn by a swap; nothing fitted them", fit
        )
    whole = getattr(subject.model, "config", None)  # a wrapper's, not that of its text part
    if getattr(whole, "l2r_swap", None) or getattr(whole, "swapped_from", None):
        swapped = [site for site in subject.sites if isinstance(site.router, Router)]
        fresh = [site for site in swapped if _has_moved(subject, site) is False]
        if fresh:
            return warning(
                f"the swapped routers in {in_layers(fresh)} look untrained: what a draw leaves "
                "constant (gains, temperatures) has its initial value",
                fit,
            )
    routed = subject.plain.routed
    flat = [
        site
        for site in subject.sites
        if site.path in routed
        and site.sizes["num_experts"] > 1
        and bool((routed[site.path][0].std(dim=1) == 0).all())
    ]
    if flat:
        return fault(
            f"every expert has the same score in {in_layers(flat)}: the weights were never set",
            "load the checkpoint's router weights; see the load report for missing keys",
        )
    return ok("the routers score the experts differently")


def _has_moved(subject: Subject, site: Site) -> bool | None:
    """Tell whether a parameter that every draw gives alike has another value; None without."""
    router = site.router
    with torch.random.fork_rng(devices=[]):
        twins = [attach_router(router.config, stream=n, **site.sizes) for n in (0, 1)]
    first, second = (dict(twin.named_parameters()) for twin in twins)
    tensors = subject.tensors(site)
    constant = [name for name, value in first.items() if torch.equal(value, second[name])]
    moved = (
        not torch.equal(tensors[n].detach().float().cpu().reshape(first[n].shape), first[n])
        for n in constant
    )
    return any(moved) if constant else None


def _narrow_dtype(site: Site) -> str | None:
    """Dtype of a parameter of ours that is narrower than the router's configuration says."""
    wanted = getattr(torch, site.router.config.dtype)
    for tensor in site.router.parameters():
        if tensor.is_floating_point() and tensor.dtype.itemsize < wanted.itemsize:
            return _name(tensor.dtype)
    return None


def _floats(site: Site) -> list[Tensor]:
    return [p for p in trainable_parameters(site).values() if p.is_floating_point()]


def _is_narrower(tensor: Tensor, dtype: str) -> bool:
    return tensor.dtype.itemsize < getattr(torch, dtype).itemsize


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")

"""Refuse a call whose tensors do not fit together, before a kernel takes their addresses.

``fits`` compares sizes and devices only, because its time is part of every decoding step. ``walk``
makes the same comparison by the letters of the sizes, and its error names the tensor at fault.

Shape letters: T tokens, D hidden size, R rank, N experts, H anchors per expert, K chosen.
"""

from typing import Any, Final

import torch
from torch import Tensor

from l2r.kernels.contract import INPUTS, SCORINGS, Options, Tensors

DTYPES: Final = frozenset({torch.float32, torch.bfloat16, torch.float16})
_LAYOUT = ("TD", "RD", "D", "NHR", "TK", "TN", "TR", "T", "TK", "TK", "T")
_LABELS = tuple("projection" if name == "weight" else name for name in Tensors._fields)
_RESULTS = {"rstd": torch.float32, "weights": torch.float32, "indices": torch.int64}
_RESULTS["lse"] = torch.float32
# Limits of the Triton kernels: name and largest size by letter.
_MAX_SIZES = {"N": ("num_experts", 1024), "H": ("heads", 64), "R": ("rank", 64)}
# They count blocks of tokens and the entries of a parameter in 32 bits.
_MAX_SIZES["T"] = ("tokens", 2**31 - 2**10)
_MAX_NUMBERS = 2**31 - 1


def check(given: Tensors, top_k: int | None) -> None:
    """Raise ValueError unless the given tensors are those of a call and fit together.

    ``top_k`` is None where nothing is selected.
    """
    if not fits(given, top_k):
        walk(given, top_k)
        raise AssertionError(f"no fault found in {[t if t is None else t.shape for t in given]}")


def fits(given: Tensors, top_k: int | None) -> bool:
    """Return whether ``walk`` would raise no error: all shapes at once against those expected."""
    x, weight, gain, anchors, routes, logits = given[:INPUTS]
    if x is None:
        if logits is None or logits.dim() != 2:
            return False
        first, (tokens, experts) = logits, logits.shape
        choice = None if routes is None else (tokens, top_k)
        expected: tuple[Any, ...] = (None, None, None, None, choice, (tokens, experts))
        sizes: tuple[int, ...] = (experts,)
    else:
        if anchors is None or x.dim() != 2 or anchors.dim() != 3:
            return False
        first, (tokens, hidden), (experts, heads, rank) = x, x.shape, anchors.shape
        gains = None if gain is None else (hidden,)
        choice = None if routes is None else (tokens, top_k)
        expected = ((tokens, hidden), (rank, hidden), gains, anchors.shape, choice, None)
        sizes = (hidden, rank, heads, experts)
    present = [tensor for tensor in given[:INPUTS] if tensor is not None]
    return (
        tuple([None if tensor is None else tensor.shape for tensor in given[:INPUTS]]) == expected
        and 0 not in sizes
        and (gain is None or weight is None or gain.dtype is weight.dtype)
        and (routes is None or routes.dtype is torch.int64)
        and (x is not None if top_k is None else 1 <= top_k <= experts)
        and all(tensor.device == first.device for tensor in present)
    )


def walk(given: Tensors, top_k: int | None) -> dict[str, Any]:
    """Return sizes by their letters; raise ValueError by name where ``given`` do not fit."""
    sizes = _presence(given, top_k)
    if top_k is not None and not 1 <= top_k <= sizes["N"]:
        raise ValueError(f"top_k must be between 1 and {sizes['N']}; got top_k={top_k}")
    if given.gain is not None and given.weight is not None:
        _same_dtype("gain", given.gain, given.weight.dtype)
    if given.routes is not None:
        _same_dtype("routes", given.routes, torch.int64)
    return sizes


def check_operation(given: Tensors, options: Options, backend: str) -> None:
    """Raise ValueError for a direct call of the operation: ``check``, dtypes, names and limits.

    ``dispatch`` never passes a wrong dtype, scoring or backend, nor a size beyond its limit.
    """
    scoring = options.score.scoring
    if scoring not in SCORINGS:
        raise ValueError(f"scoring must be one of {', '.join(SCORINGS)}; got {scoring!r}")
    if backend not in ("cpu", "triton"):
        raise ValueError(f"backend must be one of cpu, triton; got {backend!r}")
    for label, tensor in zip(_LABELS, given._replace(routes=None)[:INPUTS], strict=False):
        if tensor is not None and tensor.dtype not in DTYPES:
            allowed = ", ".join(sorted(str(dtype) for dtype in DTYPES))
            raise ValueError(f"{label} must be of {allowed}; got {tensor.dtype}")
    check(given, options.top_k or None)
    if backend == "triton" and (reason := beyond_triton(given)):
        raise ValueError(reason)


def beyond_triton(given: Tensors) -> str:
    """Return the reason why the Triton kernels do not take these sizes; empty where they do."""
    sizes: dict[str, Any] = {}
    for letters, tensor in zip(_LAYOUT, given, strict=True):
        if tensor is not None:
            sizes.update(zip(letters, tensor.shape, strict=True))
    for letter, (name, limit) in _MAX_SIZES.items():
        if sizes.get(letter, 0) > limit:
            return f"{name} must be <= {limit} for triton; got {name}={sizes[letter]}"
    if sizes.get("R", 0) * sizes.get("D", 0) > _MAX_NUMBERS:
        shape = [sizes["R"], sizes["D"]]
        return f"projection must have <= {_MAX_NUMBERS} numbers for triton; got {shape}"
    return ""


def check_backward(tensors: Tensors, up: Tensors, options: Options, backend: str) -> None:
    """Raise ValueError unless a backward gets what its forward returned, and gradients of that."""
    routes, top_k = tensors.x is not None, options.top_k
    given = Tensors(*tensors[:INPUTS])
    check_operation(given._replace(logits=None) if routes else given, options, backend)
    needed = {"query": routes, "rstd": tensors.gain is not None, "logits": True}
    needed |= dict.fromkeys(("weights", "indices", "lse"), top_k > 0)
    for name, wanted in needed.items():
        tensor = getattr(tensors, name)
        if (tensor is not None) is not wanted:
            rule_of = "must be given" if wanted else "must not be given"
            raise ValueError(f"{name} {rule_of} to the backward of this call")
        if tensor is not None and name in _RESULTS:
            _same_dtype(name, tensor, _RESULTS[name])
        elif tensor is not None and tensor.dtype not in DTYPES:
            raise ValueError(f"{name} must be of a dtype of the router; got {tensor.dtype}")
    _sizes(tensors, {"K": top_k})
    _check_up(tensors, up, top_k)


def _check_up(tensors: Tensors, up: Tensors, top_k: int) -> None:
    last = ["logits", "weights"] if top_k else ["logits"]
    if all(getattr(up, name) is None for name in last):
        raise ValueError(f"the gradient of {' or '.join(last)} must be given; got None")
    for name in ("logits", "weights"):
        grad, result = getattr(up, name), getattr(tensors, name)
        if grad is None:
            continue
        if name not in last:
            raise ValueError(f"the gradient of {name} must be None, since nothing was selected")
        actual = (list(grad.shape), grad.dtype, grad.device)
        if actual != (wanted := (list(result.shape), result.dtype, result.device)):
            raise ValueError(
                f"the gradient of {name} must be {wanted[0]} of {wanted[1]} on {wanted[2]}; "
                f"got {actual[0]} of {actual[1]} on {actual[2]}"
            )


def check_indices(tensors: Tensors) -> None:
    """Raise ValueError for an index outside [0, N): the backward would write outside a tensor.

    Indices on a GPU are not read; its kernels compare indices and never use one as an address.
    """
    if tensors.indices is not None and tensors.logits is not None:
        check_range("indices", tensors.indices, tensors.logits.shape[1])


def check_range(name: str, indices: Tensor, experts: int) -> None:
    """Raise ValueError for an index outside [0, experts). Indices on a GPU are not read."""
    if not indices.is_cpu or not indices.numel():
        return
    low, high = (int(bound) for bound in torch.aminmax(indices))
    if low < 0 or high >= experts:
        wrong = low if low < 0 else high
        raise ValueError(f"{name} must be between 0 and {experts - 1}; got {wrong}")


def check_routes(routes: Tensor, experts: int) -> None:
    """Raise ValueError for a route to no expert, or to one twice. Routes on a GPU are not read."""
    if not routes.is_cpu:
        return
    given = routes[:, 0] >= 0
    check_range("routes", routes[given], experts)
    ordered = routes.sort(dim=1).values
    twice = (ordered[:, 1:] == ordered[:, :-1]) & given[:, None]
    if twice.any():
        token, place = twice.nonzero()[0].tolist()
        expert = int(ordered[token, place])
        raise ValueError(
            f"routes must be of different experts; token {token} has expert {expert} twice"
        )


def _presence(given: Tensors, top_k: int | None) -> dict[str, Any]:
    """Return sizes by letter; raise ValueError for tensors that are missing, or one too many."""
    x, weight, anchors, logits = given.x, given.weight, given.anchors, given.logits
    rules: list[tuple[str, Any, str, bool]] = [
        ("x", weight, "projection", x is not None),
        ("x", given.gain, "gain", x is not None),
        ("x", anchors, "anchors", x is not None),
        ("projection", x, "x", weight is not None),
        ("anchors", x, "x", anchors is not None),
        ("top_k", given.routes, "routes", top_k is not None),
    ]
    for wanted, tensor, name, present in rules:
        if tensor is not None and not present:
            raise ValueError(f"{wanted} must be given with {name}; got None")
    if logits is not None and x is not None:
        raise ValueError("logits must not be given with x, from which they are made; got both")
    if x is None and logits is None:
        raise ValueError("x or logits must be given; got None")
    sizes = _sizes(given, {"K": top_k} if top_k else {})
    if top_k is None and logits is not None:
        raise ValueError(f"top_k must be between 1 and {sizes['N']}; got top_k=0")
    return sizes


def _sizes(tensors: Tensors, known: dict[str, Any]) -> dict[str, Any]:
    """Return sizes by letter; raise ValueError for one that differs or is 0, and for devices."""
    sizes, device, first = dict(known), None, ""
    for label, letters, tensor in zip(_LABELS, _LAYOUT, tensors, strict=True):
        if tensor is None:
            continue
        shape = list(tensor.shape)
        wanted = [sizes.get(letter, letter) for letter in letters]
        fitting = len(shape) == len(letters) and all(
            isinstance(want, str) or want == size for want, size in zip(wanted, shape, strict=True)
        )
        if not fitting:
            raise ValueError(f"{label} must be [{', '.join(map(str, wanted))}]; got {shape}")
        sizes.update(zip(letters, shape, strict=True))
        if device is None:
            device, first = tensor.device, label
        elif tensor.device != device:
            raise ValueError(f"{label} must be on {device}, as {first}; got {tensor.device}")
        for letter in letters:
            if letter != "T" and sizes[letter] == 0:
                minimum = f"with {', '.join(c for c in letters if c != 'T')} >= 1"
                raise ValueError(f"{label} must be [{', '.join(letters)}] {minimum}; got {shape}")
    return sizes


def _same_dtype(name: str, tensor: Tensor, dtype: torch.dtype) -> None:
    if tensor.dtype is not dtype:
        raise ValueError(f"{name} must be of {dtype}; got {tensor.dtype}")

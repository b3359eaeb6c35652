"""What the tests of every engine share: routers, text, closeness, and our own commands."""

from copy import deepcopy

import torch
from transformers import AutoModelForCausalLM

from l2r.engines.proof import MULTIPLE
from l2r.functional import load_balancing_loss, router_z_loss
from l2r.hf.models import computing_experts
from l2r.routers import capture

ROUTERS = {
    "linear": {},
    "linear_sips": {},
    "xmoe": {"rank": 4},
    "l2r_dot": {"rank": 2, "heads": 4},
    "l2r_cosine": {"rank": 2, "heads": 4, "temperature": 0.5},
    "l2r_sips": {"rank": 2, "heads": 4, "learn_temperature": True},
    # Queries, keys and values of order one for a normalized input of width 32. With 0.02 logits
    # differ by 1e-8, less than a softmax resolves: an engine, which orders scores, meets ties there
    # that our routers, which order logits, do not meet.
    "attention": {"init_std": 32**-0.5},
    "low_rank": {"rank": 4},
    "mixture": {"routers": 2, "rank": 4},
    "perturbed_cosine": {"rank": 4},
    "product_keys": {"rank": 8},
}
SIPS = {"kind": "l2r_sips", "rank": 2, "heads": 4}


def assert_close(found, expected, name="", *, scale=None, room=1e-6):
    """Equal to 1e-6 of the largest entry, or of ``scale`` where terms larger than it cancel.

    The two sides sum the same numbers in another order: each addition rounds by 2^-24 = 6e-8 of
    a partial sum, and some hundred of them with random signs add up to sqrt(256) * 6e-8 = 1e-6.
    ``room`` is larger where such sums enter others, over ranks, layers and steps.
    """
    assert torch.isfinite(found).all() and found.shape == expected.shape, name
    scale = expected.abs().max().item() if scale is None else scale
    worst = (found - expected).abs().max().item()
    assert worst <= room * scale, f"{name}: {worst:.2e} > {room} * {scale:.2e}"


def periodic(rows, length, vocabulary, seed=0):
    """Token rows [B, S] that a small model learns in a few steps."""
    start = torch.randint(vocabulary, (rows, 1), generator=torch.Generator().manual_seed(seed))
    return (start + 3 * torch.arange(length)) % vocabulary


def next_token_loss(logits, ids):
    return torch.nn.functional.cross_entropy(
        logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten()
    )


def walk_table(rows):
    """Lines of a Markdown table of a walk over an engine's settings, a row for each value.

    A row has of, field, value, moved (share of the largest logit), outcome (equal, refused or
    engine), difference and said.
    """
    yield "| of | field | value | moves logits by | outcome |"
    yield "| --- | --- | --- | --- | --- |"
    for row in rows:
        moved = "-" if row.moved is None else f"{row.moved:.1%}"
        said = row.said.replace("|", "\\|").replace("<", "&lt;")
        close = "within rounding" if row.difference is None else f"{row.difference:.1e}"
        outcome = f"equal, {close}" if row.outcome == "equal" else said
        outcome = f"not on a CPU: {said}" if row.outcome == "engine" else outcome
        yield f"| {row.of} | `{row.field}` | `{row.value}` | {moved} | {outcome} |"


def backward_in_float64(model, ids, balance, z):
    """A copy of our model with the gradients of the same loss in float64.

    ``balance`` and ``z`` are coefficients of the router losses.
    """
    wide = deepcopy(model).double()
    wide.zero_grad()
    with capture(wide) as captured, computing_experts(wide, "eager"):
        logits = wide(ids).logits
    balancing = load_balancing_loss(captured.logits(), captured.indices(), variant="olmoe")
    loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    (loss + balance * balancing + z * router_z_loss(captured.logits())).backward()
    return wide


def check_gradients(pairs, exact):
    """Each gradient of ours and of an engine, equal within the rounding of ours.

    ``pairs`` are ours and theirs, ``exact`` ours in float64 and theirs. A gradient sums over tokens
    what enters the sums of the layer before, so that its rounding is measured.
    """
    compared = 0
    for (here, there), (true, _) in zip(pairs, exact, strict=True):
        assert here.abs().max() > 0
        rounding = float((here - true).abs().max() / here.abs().max())
        assert rounding < 1e-5
        assert_close(there, here, str(compared), room=max(1e-6, MULTIPLE * rounding))
        compared += 1
    assert compared > 20


def check_checkpoint(model, ids, logits, tokenizer, folder, l2r, text_folder):
    """Save; AutoModelForCausalLM gives ``logits`` again; diagnose and eval read the folder."""
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    kind = AutoModelForCausalLM if not hasattr(model.config, "l2r_swap") else None
    if kind is not None:
        with torch.no_grad():
            loaded = kind.from_pretrained(folder)(ids).logits
        assert_close(loaded, logits, "logits of the folder")
    sizes = ("--instances", 4, "--length", 32, "--sample", 64, "--certify", 4)
    done = l2r("diagnose", folder, "--data", text_folder, "--out", folder / "page", *sizes)
    assert done.code == 0, done.err
    done = l2r("eval", folder, "--out", folder, "--limit", 4, "--tasks", "piqa,boolq")
    assert done.code == 0 and (folder / "evaluation.json").is_file(), done.err

"""Checks of the losses that balance the experts, and of padding.

Shape letters: B sequences, S length, T tokens, N experts.
"""

import math

import torch
from torch import Tensor

from l2r.analysis.diagnostics.checks.finding import Finding, fault, ok, skipped, warning
from l2r.analysis.diagnostics.checks.own_loss import OwnLoss
from l2r.analysis.diagnostics.checks.subject import Pass, Subject
from l2r.functional import load_balancing_loss
from l2r.hf.swap import moves_biases, selection_biases

_NO_LOSS = "the family has no balance loss in transformers"
_ADD = (
    "add router losses: l2r.engines.trainer.add_router_losses(trainer), or l2r.router_losses of "
    "what l2r.capture records in a loop of your own"
)
_MOVE = (
    "move it after each step: l2r.engines.trainer.add_bias_balancing(trainer), or "
    "l2r.bias_balancing(model) in a loop of your own"
)


def balances_more(subject: Subject) -> str:
    """Say what makes loads more even, by what balances the model now."""
    own = subject.own_loss
    if subject.balance > 0 or (own is not None and own.is_on):
        return "raise the weight of the balance loss"
    if moves_biases(subject.model):
        return "raise the speed of the bias balancing"
    if own is not None:
        return f"turn the model's balance loss on ({_switch(subject)})"
    return _MOVE if selection_biases(subject.model) else _ADD


def _switch(subject: Subject) -> str:
    """Name the switch of the model's own balance loss: wrappers read their text's configuration."""
    whole, text = subject.model.config, subject.config
    inside = (f"{name}." for name, part in vars(whole).items() if part is text)
    return f"config.{next(inside, '')}output_router_logits"


def auxiliary_loss(subject: Subject) -> Finding:
    """Tell whether some loss or bias balances the experts, once, with a sensible weight."""
    for name, weight in (("balance", subject.balance), ("z", subject.z)):
        if not 0 <= weight < math.inf:
            return fault(f"the loss weight {name} is {weight}", "give it a finite weight >= 0")
    if subject.own_loss is not None:
        return _own_loss(subject, subject.own_loss)
    if subject.balance > 0:
        return ok(f"the training adds a balance loss of weight {subject.balance:g}")
    if moves_biases(subject.model):
        return ok(f"{_NO_LOSS}: the training moves its selection bias")
    if selection_biases(subject.model):
        return warning(
            f"{_NO_LOSS}, and its selection bias moves in no training of transformers: nothing "
            "balances the experts",
            _MOVE,
        )
    return warning(f"{_NO_LOSS}, and no selection bias: nothing balances the experts", _ADD)


def _own_loss(subject: Subject, own: OwnLoss) -> Finding:
    written = getattr(subject.config, "router_aux_loss_coef", own.weight)
    if own.weight != written:
        return fault(
            f"the model weighs its balance loss by {own.weight:g}, config.json says {written:g}",
            "set model.router_aux_loss_coef too: the model read the config when it was built",
        )
    if not 0 <= own.weight < math.inf:
        return fault(f"router_aux_loss_coef is {own.weight:g}", "give it a finite weight >= 0")
    return _own_loss_once(subject, own)


def _own_loss_once(subject: Subject, own: OwnLoss) -> Finding:
    if not own.is_on:
        if subject.balance > 0:
            return ok(f"off in the model; the training adds one of weight {subject.balance:g}")
        if moves_biases(subject.model):
            return ok("off in the model; the training moves its selection bias")
        other = f"; or, since it has a selection bias, {_MOVE}"
        return warning(
            f"off: the model's loss has no balance loss while {_switch(subject)} is False",
            f"set it to True, or {_ADD}{other if selection_biases(subject.model) else ''}",
        )
    if own.weight == 0:
        return warning("on, with router_aux_loss_coef=0", "give it a weight, such as 0.01")
    if subject.balance > 0:
        return warning(
            f"the model adds a balance loss of weight {own.weight:g}, the training one of "
            f"{subject.balance:g}",
            "turn one off; with labels in the batch both count",
        )
    return ok(f"on, with router_aux_loss_coef={own.weight:g}")


def loss_value(subject: Subject) -> Finding:
    """Compare the model's loss with cross-entropy plus the weighted balance loss of its logits."""
    own = subject.own_loss
    if own is None or not subject.reads_text:
        return skipped(_NO_LOSS if subject.reads_text else "the batch holds no token ids")
    done, mask = subject.plain, subject.batch.get("attention_mask")
    aux, by_hand = _auxiliary(done), _by_hand(subject, done, mask)
    if not _close(aux, by_hand, done):
        return fault(
            f"the model returns a balance loss of {aux:.4f}, its router logits give {by_hand:.4f}",
            "num_experts and num_experts_per_tok of the model must be its routers'; "
            "a hook or patch may hide router logits",
        )
    labels = subject.labels(subject.batch)
    task = subject.model.loss_function(
        logits=done.output.logits, labels=labels, vocab_size=subject.config.vocab_size
    )
    weight = own.weight
    added, whole = float(done.output.loss - task), float(done.output.loss)
    # Both losses are sums of float32 numbers of this size.
    rounding = 16 * torch.finfo(torch.float32).eps * abs(whole)
    if not abs(added - weight * aux) <= rounding + _half_digits(done) * abs(weight * aux):
        return fault(
            f"the loss exceeds the cross-entropy by {added:.6f}, and {weight:g} x {aux:.4f} = "
            f"{weight * aux:.6f} was due",
            "the model's forward must add router_aux_loss_coef x balance loss",
        )
    return ok(
        f"{whole:.4f} = cross-entropy {float(task):.4f} + {weight:g} x balance loss {aux:.4f}"
    )


def padding(subject: Subject) -> Finding:
    """Tokens outside of the attention mask must not change the logits of the others."""
    if not subject.reads_text:
        return skipped("the batch holds no token ids")
    mask, first, second = subject.padded
    a, b = (done.output.logits[0, mask[0].bool()].float() for done in (first, second))
    scale = float(a.abs().max())
    changed = (a - b).abs().amax(dim=1)
    # A median: rounding may send a single token to another expert.
    typical = float(changed.median()) / max(scale, torch.finfo(torch.float32).tiny)
    eps = torch.finfo(first.output.logits.dtype).eps
    if not typical <= eps**0.5:
        return fault(
            f"padding changes the logits of real tokens by {typical:.1%} of the largest",
            "the model ignores the mask: use an attention implementation that takes one, or "
            "batches without padding",
        )
    return ok(f"other tokens under the mask change logits by {typical:.1g} of the largest")


def padding_in_loss(subject: Subject) -> Finding:
    """Tokens outside of the attention mask must not count in the balance loss."""
    if subject.own_loss is None or not subject.reads_text:
        return skipped(f"{_NO_LOSS}; pass mask= to load_balancing_loss")
    mask, first, _ = subject.padded
    aux = _auxiliary(first)
    without, whole = (_by_hand(subject, first, m) for m in (mask, None))
    if _close(aux, without, first):
        return ok(f"the balance loss {aux:.4f} is that of the real tokens")
    if _close(aux, whole, first):
        return fault(
            f"the balance loss {aux:.4f} counts padding; the real tokens' is {without:.4f}",
            "pass attention_mask to the balance loss, or train on packed sequences",
        )
    return fault(
        f"the balance loss of a padded batch is {aux:.4f}, its router logits give {without:.4f}",
        "see the check of the loss",
    )


def _auxiliary(done: Pass) -> float:
    """Balance loss that a model returned; transformers returns 0 without router logits."""
    value = getattr(done.output, "aux_loss", None)
    return 0.0 if value is None else float(value)


def _by_hand(subject: Subject, done: Pass, mask: Tensor | None) -> float:
    """Compute transformers' balance loss of the routers' logits: softmax, top k, all layers.

    Layers that choose by token ids have nothing to balance and do not count.
    """
    logits = [done.routed[site.path].logits for site in subject.sites if not site.by_token]
    top_k = subject.sites[0].sizes["top_k"]
    best = [layer.topk(top_k, dim=-1).indices for layer in logits]
    flat = mask if mask is not None and mask.numel() == len(logits[0]) else None
    return float(load_balancing_loss(logits, best, variant="hf", mask=flat))


def _close(one: float, other: float, done: Pass) -> bool:
    return abs(one - other) <= _half_digits(done) * abs(other)


def _half_digits(done: Pass) -> float:
    return float(max(torch.finfo(logits.dtype).eps for logits in done.logits())) ** 0.5

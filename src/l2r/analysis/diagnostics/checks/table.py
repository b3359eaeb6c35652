"""The table of checks. A new check is a function from a Subject to a Finding, and a row here."""

from collections.abc import Callable, Mapping
from dataclasses import replace

from torch import Tensor, nn

from l2r.analysis.diagnostics.checks import gradients, losses, rules, weights
from l2r.analysis.diagnostics.checks.finding import Finding, fault, ok, skipped
from l2r.analysis.diagnostics.checks.loads import loads
from l2r.analysis.diagnostics.checks.subject import Subject
from l2r.routers.observe import other_routers

Check = Callable[[Subject], Finding]

# Of weights and settings; that of the loss asks the model, and does without where it does not run.
AT_REST: Mapping[str, Check] = {
    "finite": weights.finite,
    "dtype": weights.dtype,
    "quantized": weights.quantized,
    "selection": rules.selection,
    "selection bias": rules.bias,
    "auxiliary loss": losses.auxiliary_loss,
    "trainable": gradients.trainable,
    "checkpointing": gradients.checkpointing,
}
# Of forward and backward passes.
RUNNING: Mapping[str, Check] = {
    "weights": rules.weights,
    "trained": weights.trained,
    "loss": losses.loss_value,
    "padding": losses.padding,
    "padding in the loss": losses.padding_in_loss,
    "loads": loads,
    "gradient": gradients.gradient,
    "balance gradient": gradients.balance_gradient,
}
CHECKS = 1 + len(AT_REST) + len(RUNNING)


def check_model(
    model: nn.Module,
    batch: Mapping[str, Tensor] | None = None,
    *,
    balance: float = 0.0,
    z: float = 0.0,
    report: Callable[[int, int, str], None] = lambda done, total, name: None,
) -> list[Finding]:
    """Check the routers of ``model`` before it is trained or used: one finding for each check.

    ``model`` has routers of ours, swapped ones, or those of a supported family. ``batch`` holds its
    inputs by name (``input_ids`` [B, S], ``attention_mask`` [B, S]; ``pixel_values``), from the
    text that it is to read; without one ids are drawn, and loads are not judged. ``balance`` and
    ``z`` are the weights of router losses that the training adds to the model's own. ``report`` is
    given the number of checks done, their number, and the name of the next.

    Runs a few forward passes and the gradient of the routers, in evaluation mode. Weights,
    gradients and modes stay as they are.

    Raises ValueError for a model without a supported router, and without a batch where none can
    be drawn.
    """
    subject = Subject(model, batch, balance=balance, z=z)
    report(0, CHECKS, "runs")
    runs = _result("runs", _runs, subject)
    running = RUNNING if runs.status == "ok" else dict.fromkeys(RUNNING, _needs_a_pass)
    findings = [runs]
    for name, check in (*AT_REST.items(), *running.items()):
        report(len(findings), CHECKS, name)
        findings.append(_result(name, check, subject))
    report(CHECKS, CHECKS, "")
    return findings


def _result(name: str, check: Check, subject: Subject) -> Finding:
    """Run one check; one that raises is a fault of the model, and the next one runs."""
    try:
        found = check(subject)
    except Exception as error:  # of any kind, from the code of any model
        reason = (str(error).strip().splitlines() or [""])[0]
        found = fault(
            f"raises {type(error).__name__}: {reason}",
            "see the other faults, and whether the batch fits the model",
        )
    return replace(found, check=name)


def _needs_a_pass(subject: Subject) -> Finding:
    return skipped("the model does not run")


def _runs(subject: Subject) -> Finding:
    """Check the forward pass on which other checks build."""
    others = other_routers(subject.model)
    apart = f"; others read no text and stand apart: {', '.join(others)}" if others else ""
    return ok(f"a forward pass calls {len(subject.plain.routed)} routers{apart}")

"""Conduct a diagnosis: one pass over the data for all reducers, then gain, layers and text."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from l2r.analysis.diagnostics.choice_log import ChoiceLog, Choices, choices_of
from l2r.analysis.diagnostics.collect import collect_records
from l2r.analysis.diagnostics.model_diagnosis import diagnose_layers
from l2r.analysis.diagnostics.routing_gain import batch_loss, measure_routing_gain, sample_evenly
from l2r.analysis.diagnostics.settings import Extent
from l2r.analysis.diagnostics.specialization import saturation
from l2r.analysis.diagnostics.text_routing import TextTrace
from l2r.analysis.inputs import DiagnosisSubject, open_subject
from l2r.errors import InputError
from l2r.files.arrays import PatchRouting, TextRouting
from l2r.files.diagnosis import Diagnosis
from l2r.files.folder import RunFolder
from l2r.hf.checkpoints import FLOAT32, Placement, local_checkpoint
from l2r.laboratory import need_laboratory

DiagnosisProgress = Callable[
    [str, int, int], None
]  # what is being done, and how much of how much is done


def _silent(*_: Any) -> None:
    pass


class Diagnosed(NamedTuple):
    """A diagnosis, with the routing of its text or of its images, and the class of the model."""

    diagnosis: Diagnosis
    text: TextRouting | None
    patches: PatchRouting | None
    model: str

    def save(self, folder: Path) -> None:
        """Write diagnosis.json and diagnosis.safetensors, text.npz or patches.npz.

        The numbers come last, so that they never stand there without the rest.
        """
        run = RunFolder(folder)
        if self.text is not None:
            self.text.save(run.text)
        if self.patches is not None:
            self.patches.save(run.patches)
        self.diagnosis.save(folder)


def diagnose_checkpoint(
    checkpoint: str | Path,
    data: str | None = None,
    *,
    instances: int = 64,
    length: int = 256,
    extent: Extent | None = None,
    earlier: Sequence[Path] = (),
    placement: Placement = FLOAT32,
    revision: str | None = None,
    trust_remote_code: bool = False,
    report: DiagnosisProgress = _silent,
    say: Callable[[str], None] = _silent,
) -> Diagnosed:
    """Diagnose a checkpoint: a folder, a run folder or a hub id with its ``revision``.

    ``data`` is what ``open_subject`` reads, ``instances`` rows of ``length`` tokens, or as many
    images. ``say`` gets a line about the data, ``report`` the progress; ``earlier`` is that of
    ``diagnose_subject``.

    Raises ValueError for a folder without a model, data that does not fit and sizes too small.
    """
    for name, value, least in (("instances", instances, 1), ("length", length, 2)):
        if value < least:
            raise InputError(f"{name} must be >= {least}; got {value}")
    subject = open_subject(
        local_checkpoint(str(checkpoint), revision=revision, code=trust_remote_code),
        data,
        placement=placement,
        instances=instances,
        length=length,
        report=say,
        trust_remote_code=trust_remote_code,
    )
    diagnosed = diagnose_subject(subject, extent, earlier=earlier, report=report)
    diagnosed.diagnosis.info["checkpoint"] = str(checkpoint)
    return diagnosed


def diagnose_subject(
    subject: DiagnosisSubject,
    extent: Extent | None = None,
    *,
    earlier: Sequence[Path] = (),
    report: DiagnosisProgress = _silent,
) -> Diagnosed:
    """Diagnose an opened model on its data.

    ``earlier``: checkpoints of the same training run, whose choices are compared with those of
    the model (``over_time`` in the diagnosis). Their weights replace the model's.
    """
    sizes = extent or Extent()
    model: Any = subject.model
    batches = partial(subject.batches, sizes.batch_size, subject.device)
    trace = None
    if sizes.text and subject.images is None:
        trace = TextTrace(model, domains=subject.domains, tokens=sizes.text)
    log = ChoiceLog()
    total = -(-subject.items // sizes.batch_size)
    records = collect_records(
        model,
        batches(),
        domains=subject.domains,
        threshold=sizes.threshold,
        sample=sizes.sample,
        seed=sizes.settings.seed,
        run=subject.run,
        reducers=[log] if trace is None else [log, trace],
        report=lambda done: report("data", done, total),
    )
    choices, layers = log.choices(), len(records)
    gain = None
    if sizes.gain:
        few = sample_evenly(batches(), subject.items, sizes.gain, sizes.batch_size)
        gain = measure_routing_gain(model, few, batch_loss)
    diagnosis = diagnose_layers(
        records,
        domains=subject.domains,
        settings=sizes.settings,
        choices=choices,
        gain=gain,
        report=lambda done: report("layers", done, layers),
    )
    text = patches = None
    if trace is not None:
        text = trace.result(subject.tokenizer, lambda done: report("text", done, layers))
    if subject.images is not None and sizes.patches:
        from l2r.analysis.diagnostics.patches import validation_patches  # needs image packages

        patches = validation_patches(model, subject.images, sizes.patches)
    if earlier:
        diagnosis.info["over_time"] = _saturation(earlier, subject, sizes, choices, report)
    return Diagnosed(diagnosis, text, patches, type(model).__name__)


def _saturation(
    folders: Sequence[Path],
    subject: DiagnosisSubject,
    sizes: Extent,
    last: Choices,
    report: DiagnosisProgress,
) -> dict[str, Any]:
    load_weights = need_laboratory("training", "load_weights", "a run's earlier checkpoints")

    experts = {}
    for number, folder in enumerate(folders, start=1):
        step = load_weights(folder, subject.model)
        batches = subject.batches(sizes.batch_size, subject.device)
        experts[step] = choices_of(subject.model, batches, subject.run).experts
        report("checkpoints", number, len(folders))
    return saturation(experts, last.experts)

"""``l2r diagnose``: what the routers of one checkpoint or several do."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from l2r.cli.experiment import say
from l2r.cli.options import (
    AsJson,
    BatchSize,
    Device,
    DeviceMap,
    Dtype,
    Revision,
    TrustRemoteCode,
)

if TYPE_CHECKING:
    from l2r.analysis.diagnostics.choices import Choices
    from l2r.analysis.diagnostics.reading import Batch
    from l2r.analysis.inputs import Subject
    from l2r.runs.diagnosis import Diagnosis


def diagnose(
    checkpoints: Annotated[
        list[str],
        typer.Argument(help="Hugging Face folders, run folders or hub ids, compared in order."),
    ],
    data: Annotated[
        str | None,
        typer.Option(
            help="File or folder of text, or token files (default: the embedded corpus); for "
            "image classifiers digits, fashion-mnist or a folder (default: the run's own images)."
        ),
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for the page and the numbers.")] = Path(
        "diagnosis"
    ),
    instances: Annotated[int, typer.Option(help="Rows of text over all domains, or images.")] = 64,
    length: Annotated[int, typer.Option(help="Tokens per row.")] = 256,
    batch_size: BatchSize = 8,
    sample: Annotated[int, typer.Option(help="Tokens kept for noise and figures.")] = 2048,
    certify: Annotated[
        int, typer.Option(help="Of these, tokens that get a certified radius; 0 for none.")
    ] = 128,
    gain: Annotated[
        int,
        typer.Option(
            help="Sequences (of images up to 2,048) whose loss is taken with other experts too; "
            "0 for none."
        ),
    ] = 16,
    over_time: Annotated[
        bool,
        typer.Option(
            help="How far earlier checkpoints choose as the last: of one run, or those given."
        ),
    ] = False,
    text: Annotated[
        int, typer.Option(help="Tokens shown as text with their experts; 0 for none.")
    ] = 1024,
    sigma: Annotated[float, typer.Option(help="Noise on router inputs.")] = 0.02,
    threshold: Annotated[float, typer.Option(help="Margins below it are low.")] = 0.2,
    seed: Annotated[int, typer.Option(help="Of the sample and the noise.")] = 0,
    revision: Revision = None,
    dtype: Dtype = "auto",
    device: Device = "auto",
    device_map: DeviceMap = None,
    trust_remote_code: TrustRemoteCode = False,
    as_json: AsJson = False,
) -> None:
    """Margins, robustness, certified radii, geometry and usage of any MoE checkpoint.

    Runs every checkpoint on the same data, saves its diagnosis, prints tables, writes the page.

    Example: l2r diagnose runs/demo/linear runs/demo/l2r_sips --out diagnosis
    """
    from l2r.analysis.diagnostics.choices import ChoiceLog
    from l2r.analysis.diagnostics.collect import collect
    from l2r.analysis.diagnostics.diagnose import Settings
    from l2r.analysis.diagnostics.diagnose import diagnose as measure
    from l2r.analysis.diagnostics.routing_gain import batch_loss, routing_gain, spread
    from l2r.analysis.inputs import open_subject
    from l2r.cli.console import progress_bars
    from l2r.hf.checkpoints.hub import local_checkpoint
    from l2r.hf.checkpoints.placement import Placement
    from l2r.report.diagnosis import write_diagnosis
    from l2r.report.text_view import text_sections
    from l2r.runs.atomic import make_folder

    sizes = {"instances": instances, "length": length, "batch-size": batch_size}
    _check_sizes(**sizes, gain=gain)
    earlier = training_checkpoints(checkpoints) if over_time else []
    placement = Placement(dtype, device, device_map, say)
    settings, views, texts = Settings(sigma=sigma, seed=seed, certify=certify), {}, {}
    for name, checkpoint in names(checkpoints).items():
        folder = make_folder(out, name)
        subject = open_subject(
            local_checkpoint(checkpoint, revision=revision, code=trust_remote_code),
            data,
            placement=placement,
            instances=instances,
            length=length,
            report=say,
            trust_remote_code=trust_remote_code,
        )
        model: Any = subject.model
        log, batches = ChoiceLog(), partial(subject.batches, batch_size, subject.device)
        traced = text != 0 and subject.images is None
        trace = _trace(model, subject, text) if traced else None
        with progress_bars() as bars:
            records = collect(
                model,
                batches(),
                domains=subject.domains,
                threshold=threshold,
                sample=sample,
                seed=seed,
                run=subject.run,
                reducers=[log, trace] if trace else [log],
                report=partial(bars, f"{name}: data", total=-(-subject.items // batch_size)),
            )
        choices = log.choices()
        few = spread(batches(), subject.items, gain, batch_size) if gain else []
        with progress_bars() as bars:
            diagnosis = measure(
                records,
                domains=subject.domains,
                settings=settings,
                choices=choices,
                gain=routing_gain(model, few, batch_loss) if few else None,
                report=partial(bars, f"{name}: layers", total=len(records)),
            )
            if trace is not None:
                counted = partial(bars, f"{name}: text", total=len(records))
                texts[name] = trace.result(subject.tokenizer, counted)
                texts[name].save(folder / "text.npz")
        if subject.images is not None:
            typer.echo(f"patches: {_patches(folder, model, subject.images)}", err=as_json)
        if earlier:
            with progress_bars() as bars:
                done = partial(bars, f"{name}: checkpoints", total=len(earlier))
                diagnosis.info["over_time"] = within_run(earlier, subject, batches, choices, done)
        diagnosis.info["checkpoint"] = checkpoint
        diagnosis.save(folder)
        views[name] = diagnosis
    if over_time and not earlier:
        diagnosis.info["over_time"] = of_list(views)
        diagnosis.save(folder)
    page = out / "index.html"
    write_diagnosis(views, page, opening=text_sections(texts, page))
    _show(views, as_json)
    typer.echo(f"page: {page}", err=as_json)


def _check_sizes(**options: int) -> None:
    for option, value in options.items():
        least = 0 if option == "gain" else 1
        if value < least:
            raise ValueError(f"{option} must be >= {least}; got {value}")


def _trace(model: Any, subject: Any, tokens: int) -> Any:
    from l2r.analysis.diagnostics.text_routing import TextTrace

    return TextTrace(model, domains=subject.domains, tokens=tokens)


def _patches(folder: Path, model: Any, images: Any) -> Path:
    """The page of what each patch of a few images chose."""
    from l2r.analysis.diagnostics.patches import validation_patches
    from l2r.report.patches import write_patch_page

    routing = validation_patches(model, images, count=12)
    return write_patch_page(folder, routing, type(model).__name__)


def _show(views: Any, as_json: bool) -> None:
    from l2r.cli.console import print_table
    from l2r.report.diagnosis import checkpoint_tables, full_table

    for table in [full_table(views)] if as_json else checkpoint_tables(views):
        print_table(table, as_json=as_json)


def names(checkpoints: list[str]) -> dict[str, str]:
    """A name for every checkpoint: its last folder, or more of the path where that repeats."""
    paths = [Path(checkpoint).resolve() for checkpoint in checkpoints]
    for depth in range(1, max(len(path.parts) for path in paths) + 1):
        short = ["-".join(path.parts[-depth:]).replace("/", "") for path in paths]
        if len(set(short)) == len(short):
            return dict(zip(short, checkpoints, strict=True))
    raise ValueError(f"checkpoints must differ; got {', '.join(checkpoints)}")


def training_checkpoints(checkpoints: Sequence[str]) -> list[Path]:
    """Checkpoints that training left in the run given alone; none where several are given.

    Raises ValueError for one thing alone that has no more than one.
    """
    from l2r.runs.folder import RunFolder

    if len(checkpoints) > 1:
        return []
    found = RunFolder(checkpoints[0]).complete_checkpoints()
    if len(found) < 2:
        raise ValueError(
            "over-time needs several checkpoints, or a run that kept two or more (recipe fields "
            f"checkpoint.every and checkpoint.keep); {checkpoints[0]} has {len(found)}"
        )
    return found


def within_run(
    folders: Sequence[Path],
    subject: "Subject",
    batches: "Callable[[], Iterator[Batch]]",
    last: "Choices",
    report: Callable[[int], None],
) -> dict[str, Any]:
    """Saturation over training checkpoints; their weights replace those of the subject."""
    from l2r.analysis.diagnostics.choices import choices_of
    from l2r.analysis.diagnostics.over_time import saturation
    from l2r.training.checkpoint import load_weights

    found = {}
    for number, folder in enumerate(folders, start=1):
        step = load_weights(folder, subject.model)
        found[step] = choices_of(subject.model, batches(), subject.run).experts
        report(number)
    return saturation(found, last.experts)


def of_list(views: "Mapping[str, Diagnosis]") -> dict[str, Any]:
    """Saturation over the checkpoints given, against the last of them."""
    from l2r.analysis.diagnostics.over_time import saturation
    from l2r.runs.diagnosis import same_tokens

    *_, last = views.values()
    other = [name for name, view in views.items() if not same_tokens(view, last)]
    if other:
        raise ValueError(f"over-time needs checkpoints that read the same tokens; not {other[0]}")
    experts = {name: view.by_layer("experts") for name, view in views.items()}
    return saturation(experts, last.by_layer("experts"))

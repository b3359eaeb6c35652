"""``l2r mismatch``: which experts the same weights choose elsewhere, and what it costs."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from l2r.cli.options import (
    AsJson,
    BatchSize,
    Checkpoint,
    Device,
    Dtype,
    Length,
    Revision,
    Rows,
    Text,
    TrustRemoteCode,
    check_one_source,
    data_option,
    must_exist,
    out_option,
    read_text,
)
from l2r.cli.output import echo, say
from l2r.errors import InputError
from l2r.files.atomic import plain_json

if TYPE_CHECKING:
    import numpy as np

    from l2r.analysis import DiagnosisSubject
    from l2r.analysis.routes import Comparison
    from l2r.files.mismatch import Mismatch
    from l2r.hf.checkpoints import Placement

_ENGINES = ("vllm", "sglang")


def mismatch(
    context: typer.Context,
    checkpoint: Checkpoint,
    *,
    against: Annotated[
        str | None,
        typer.Option(
            help="What to compare with: the same weights in bf16, int8 or fp8; another checkpoint, "
            "such as this one swapped; a file of routes of the same tokens; vllm, answers of a "
            "server, see --answers."
        ),
    ] = None,
    answers: Annotated[
        Path | None,
        typer.Option(
            help="With --against vllm or sglang: answers with routed_experts, one a line.",
            callback=must_exist,
        ),
    ] = None,
    record: Annotated[
        Path | None,
        typer.Option(help="File for the reference's routes, to compare with on another machine."),
    ] = None,
    text: Text = None,
    data: Annotated[
        str | None, data_option("text, or token files (default: the embedded corpus)", must_exist)
    ] = None,
    instances: Rows = 32,
    length: Length = 256,
    batch_size: BatchSize = 8,
    out: Annotated[Path, out_option("a folder for the page and the numbers")] = Path("mismatch"),
    revision: Revision = None,
    dtype: Dtype = "float32",
    device: Device = "auto",
    trust_remote_code: TrustRemoteCode = False,
    as_json: AsJson = False,
) -> None:
    """Count the decisions that change in another arithmetic, checkpoint or engine, and their cost.

    Compares experts by layer, margin, position and kind of token, the log-probabilities with own
    and with the same experts, and counts decisions that are certified not to change.

    Example: l2r mismatch runs/demo/l2r_sips_tuned --against bf16
    """
    from l2r.files.atomic import check_place, make_folder, write_json
    from l2r.hf.checkpoints import (
        Placement,
        check_reads_text,
        is_image_classifier,
        local_checkpoint,
    )

    _check(against, answers, record)
    check_one_source(text, data)
    placement = Placement(dtype, device)
    if against is not None:
        check_place(out)
    if record is not None:
        check_place(record.parent)
    folder = local_checkpoint(checkpoint, revision=revision, code=trust_remote_code)
    if is_image_classifier(folder):
        raise InputError(f"mismatch compares language models; {checkpoint} classifies images")
    check_reads_text(folder, data, option="--data")
    text = None if text is None else read_text(text)
    other = _other_checkpoint(against, code=trust_remote_code)
    source = context.get_parameter_source("dtype")
    if _has_codes(folder, other, against) and source is not None and source.name == "DEFAULT":
        placement = replace(placement, dtype="auto")
    from l2r.analysis import announce, open_subject, reads_of_comparison, rows_read
    from l2r.report.mismatch import cost, reference, tables, verdict, write_mismatch

    code: Any = {"trust_remote_code": trust_remote_code}
    rows = rows_read(folder, instances, length, text, **code)
    sides: Any = {"against": against, "other": other, "answered": answers is not None}
    sides["recorded"] = record is not None
    work, tokens = reads_of_comparison(folder, *rows, batch_size, **sides)
    announce(work, placement, say, tokens=tokens, **code)
    subject = open_subject(
        folder,
        data,
        text=text,
        placement=placement,
        instances=instances,
        length=length,
        report=say,
        trust_remote_code=trust_remote_code,
    )
    if record is not None:
        _record(subject, batch_size, record)
    if against is None:
        return
    comparison, domain = _compare(
        subject, against, answers, other, batch_size, placement, trust_remote_code
    )
    result = _result(subject, comparison, domain)
    make_folder(out)
    result.save(out / "mismatch.npz")
    name = Path(checkpoint).name
    summary = {"checkpoint": name, "against": against, **result.summary()}
    write_json(out / "mismatch.json", summary)
    page = write_mismatch(out / "index.html", result, name=name, against=against)
    if as_json:
        echo(plain_json(summary))
    else:
        from l2r.cli.console import print_table, print_text

        echo(verdict(result, against))
        for sentence in filter(None, (cost(result), reference(against))):
            print_text(sentence)
        for table in tables(result):
            print_table(table)
    echo(f"page: {page}", err=as_json)


def _check(against: str | None, answers: Path | None, record: Path | None) -> None:
    if against is None and record is None:
        raise InputError("against must say what to compare with, or record where routes go")
    if record is not None and record.exists():
        raise InputError(f"record must be a new file; {record} exists")
    if (against in _ENGINES) != (answers is not None):
        raise InputError(
            "answers, a file of completions with routed_experts, go with --against vllm or sglang"
        )


def _other_checkpoint(against: str | None, *, code: bool) -> Path | None:
    """Folder of the checkpoint to compare with, None for something else; ValueError for neither."""
    from l2r.files.mismatch import ARITHMETICS
    from l2r.hf.checkpoints import check_is_language_model, local_checkpoint

    if against in (None, *_ENGINES, *ARITHMETICS) or Path(str(against)).is_file():
        return None
    try:
        folder = local_checkpoint(str(against), code=code)
    except InputError as error:
        raise InputError(
            f"against must be one of {', '.join((*ARITHMETICS, *_ENGINES))}, a file of routes or a "
            f"checkpoint; {error}"
        ) from error
    check_is_language_model(folder, str(against))
    return folder


def _has_codes(folder: Path, other: Path | None, against: str | None) -> bool:
    """Tell whether a checkpoint's weights can be read in their own dtype alone.

    Raises ValueError where such weights are to be compared with themselves in another arithmetic.
    """
    from l2r.files.mismatch import ARITHMETICS
    from l2r.hf.checkpoints import checkpoint_folder
    from l2r.hf.models import layout_of

    both = [folder] if other is None else [folder, other]
    found = [layout_of(checkpoint_folder(path)) for path in both]
    own = [layout for layout in found if layout is not None and not layout.takes_any_dtype]
    for layout in own if against in ARITHMETICS else ():
        layout.check_arithmetic(str(against))
    return bool(own)


def _record(subject: "DiagnosisSubject", batch_size: int, path: Path) -> None:
    from l2r.analysis.routes import read_routing
    from l2r.cli.console import progress_bars
    from l2r.hf.routes import Routes, fingerprint_of

    parts: list[Routes] = []
    rows: list[Any] = []
    with progress_bars() as bars:
        progress = partial(bars, "record", total=subject.items)
        for batch in subject.batches(batch_size, subject.device):
            parts.append(read_routing(subject.model, batch["input_ids"]).routes)
            rows += batch["input_ids"]
            progress(len(rows))
    routes = Routes.concatenate(parts)
    fingerprint = fingerprint_of(subject.model, subject.tokenizer)
    routes.with_fingerprint(fingerprint).save(path, rows=rows)
    say(f"routes: {path}")


def _compare(
    subject: "DiagnosisSubject",
    against: str,
    answers: Path | None,
    folder: Path | None,
    batch_size: int,
    placement: "Placement",
    trust: bool,
) -> "tuple[Comparison, np.ndarray]":
    """Compare the routes; also return the domain of every sequence."""
    import numpy as np

    from l2r.analysis.routes import (
        compare_models,
        compare_routes,
        in_other_arithmetic,
        read_answers,
    )
    from l2r.cli.console import progress_bars
    from l2r.hf.checkpoints import load_causal_lm
    from l2r.hf.routes import Routes, check_tokens, fingerprint_of

    model: Any = subject.model
    batches = list(subject.batches(batch_size, subject.device))
    domain = np.concatenate([batch["domain"].cpu().numpy() for batch in batches])
    ids = [batch["input_ids"] for batch in batches]
    rows = [row for part in ids for row in part]
    with progress_bars() as bars:
        if answers is not None:
            served = read_answers(answers, fingerprint_of(model))
            if served.unread:
                say(f"not read of {answers}: {', '.join(served.unread)}")
            progress = partial(bars, against, total=len(served.rows))
            rows = [row.to(subject.device) for row in served.rows]
            compared = compare_routes(model, served.routes, rows, served.log_probs, report=progress)
            return compared, np.zeros(len(rows), np.int64)
        progress = partial(bars, against, total=len(rows))
        if Path(against).is_file():
            routes = Routes.load(against)
            if not check_tokens(Path(against), rows):
                say(f"not checked: {against} does not say of which tokens its routes are")
            routes.fingerprint.check(fingerprint_of(model, subject.tokenizer))
            return compare_routes(model, routes, rows, report=progress), domain
        if folder is None:
            other = in_other_arithmetic(model, against)
        else:
            other, _ = load_causal_lm(folder, placement=placement, trust_remote_code=trust)
        return compare_models(model, other, ids, report=progress), domain


def _result(
    subject: "DiagnosisSubject", comparison: "Comparison", domain: "np.ndarray"
) -> "Mismatch":
    import numpy as np

    from l2r.analysis.diagnostics import token_pieces
    from l2r.files.mismatch import Mismatch

    arrays = comparison.arrays()
    ids, tokens = np.unique(arrays.pop("tokens"), return_inverse=True)
    return Mismatch(
        layers=np.array(comparison.fingerprint.layers),
        remarks=np.array(comparison.remarks),
        lengths=np.array(comparison.lengths),
        domain=domain,
        domains=np.array(subject.domains),
        pieces=np.array(token_pieces(subject.tokenizer, ids.tolist())),
        tokens=tokens.astype(np.int32),
        **arrays,
    )

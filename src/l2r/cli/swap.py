"""``l2r swap``: put a router into a checkpoint, and with ``--fit`` fit it to the old one."""

from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from l2r.cli.options import (
    NEW_FOLDER,
    AsJson,
    BatchSize,
    Checkpoint,
    Device,
    DeviceMap,
    Dtype,
    Layers,
    Length,
    Revision,
    RouterChanges,
    TrustRemoteCode,
    data_option,
    must_exist,
    read_layers,
    read_router,
    refuse_options,
    tokens_option,
)
from l2r.cli.output import echo, say, say_left_out
from l2r.errors import InputError
from l2r.files.atomic import plain_json
from l2r.files.wording import named_path
from l2r.report.tables import Table

if TYPE_CHECKING:
    from l2r.fitting import FitOptions, FitReport, JointOptions
    from l2r.hf.checkpoints import Placement
    from l2r.hf.swap import Site
    from l2r.routers import RouterConfig


# What only a fit reads: without one the source's files are copied, and nothing is computed.
_FIT_ONLY = (
    *("data", "tokens", "held_out", "length", "batch_size"),
    *("updates", "lr", "train_steps", "train_lr"),
    *("dtype", "device", "device_map"),
)


def swap(
    context: typer.Context,
    checkpoint: Checkpoint,
    changes: RouterChanges = None,
    *,
    out: Annotated[Path | None, NEW_FOLDER] = None,
    layers: Layers = None,
    selection: Annotated[
        Literal["family", "router"],
        typer.Option(help="family: keep the family's rule; router: the router's own."),
    ] = "family",
    fit: Annotated[
        bool, typer.Option("--fit", help="Fit the new routers to the decisions of the old ones.")
    ] = False,
    data: Annotated[
        Path | None,
        data_option("with --fit, text (default: the embedded corpus)", must_exist),
    ] = None,
    tokens: Annotated[str, tokens_option("to fit on")] = "200000",
    held_out: Annotated[int, typer.Option(help="Tokens to measure on.", min=1)] = 50_000,
    length: Length = 256,
    batch_size: BatchSize = 8,
    updates: Annotated[int, typer.Option(help="Fit updates per batch; 0 copies nothing.")] = 4,
    lr: Annotated[float, typer.Option(help="Learning rate of the fit.")] = 0.01,
    train_steps: Annotated[
        int, typer.Option(help="Steps in which all weights are trained after the fit.")
    ] = 0,
    train_lr: Annotated[float, typer.Option(help="Learning rate of these steps.")] = 1e-4,
    revision: Revision = None,
    dtype: Dtype = "auto",
    device: Device = "cpu",
    device_map: DeviceMap = None,
    trust_remote_code: TrustRemoteCode = False,
    as_json: AsJson = False,
) -> None:
    """Replace the routers of a Hugging Face MoE checkpoint or run; everything else stays.

    Prints what stands in every layer; with --fit, agreement with the old routers and perplexity
    before, after the swap and after the fit, on text that the fit has not seen; without --out it
    only measures. Without changes the new routers are those of L2RConfig.for_experts.

    Example: l2r swap my-olmoe router.kind=l2r_sips rank=16 heads=1 gamma=4 --out new

    Example: l2r swap my-olmoe --fit --data my-text --out new
    """
    from l2r.files.atomic import check_new_folder
    from l2r.files.wording import parse_tokens
    from l2r.fitting import FitOptions, JointOptions
    from l2r.hf.checkpoints import (
        Placement,
        check_is_language_model,
        check_reads_text,
        local_checkpoint,
    )

    placement, chosen = Placement(dtype, device, device_map, say), read_layers(layers)
    _check(context, changes or (), fit=fit, out=out)
    sizes: Any = {"tokens": parse_tokens(tokens), "held_out": held_out, "data": data}
    sizes |= {"length": length, "batch_size": batch_size}
    sizes |= {"options": FitOptions(updates, lr), "joint": JointOptions(train_steps, train_lr)}
    if out is not None:
        check_new_folder(out)
    folder = local_checkpoint(checkpoint, revision=revision, code=trust_remote_code)
    if fit:
        check_is_language_model(folder, checkpoint)
        check_reads_text(folder)
    options = read_router(changes)

    from l2r.cli.console import progress_bars
    from l2r.hf.checkpoints import checkpoint_folder
    from l2r.hf.swap import preferred_router, replace_routers, router_sites, select_sites

    code: Any = {"trust_remote_code": trust_remote_code}
    if fit:
        from l2r.analysis import announce, reads_of_fit

        steps: Any = {"updates": updates, "train_steps": train_steps}
        reads = reads_of_fit(sizes["tokens"], held_out, length, batch_size, **steps)
        announce([(folder, reads)], placement, say, tokens=sizes["tokens"] + held_out, **code)
    how: Any = {"kept": out is not None, "trained": train_steps > 0, **code}
    place = placement.here() if fit else None
    model, tokenizer, save = _open(checkpoint, folder, place, chosen, **how)
    before, sites = router_sites(model), select_sites(model, chosen)
    config = preferred_router(model, sites[0], selection=selection, options=options)
    where: Any = {"layers": chosen, "selection": selection}
    result, done = None, ""
    if fit:
        result = fit_to_old(folder, model, tokenizer, config, **where, **sizes)
        done = f" --fit --tokens {tokens} --updates {updates} --train-steps {train_steps}"
    else:
        replace_routers(model, config, **where)
    if out is not None:
        card = _card(named_path(checkpoint).name, done, dtype, train_steps)
        with progress_bars() as bars:
            copied = save(out, report=partial(bars, "files"), sections=[card])
    _print(_table(model, before, config.kind), result, config.kind, as_json=as_json)
    if out is not None:
        if copied:
            say(copied)
        say_left_out(checkpoint, checkpoint_folder(folder), out)
        echo(f"saved: {out}; load it with {_opening(model, out)}", err=as_json)


def _check(context: typer.Context, changes: Sequence[str], *, fit: bool, out: Path | None) -> None:
    """Raise ValueError for options of a fit without one, and where nothing is to be written."""
    if fit:
        for change in changes:
            if "=" not in change:  # a former release took the text here
                raise InputError(f"fit takes no value; the text is --data PATH; got {change!r}")
        return
    refuse_options(context, _FIT_ONLY, "a fit; give --fit too")
    if out is None:
        raise InputError("out must name a new folder; only a fit measures without one")


def _open(
    checkpoint: str,
    folder: Path,
    placement: "Placement | None",
    chosen: list[int] | None,
    *,
    kept: bool,
    trained: bool,
    trust_remote_code: bool,
) -> tuple[Any, Any, Callable[..., str]]:
    """Model and tokenizer of a folder, and what saves the model and says what it has kept.

    ``placement`` None: no weights are read. ``kept``: the model is to
    be saved. ``trained``: with all of its weights, which have changed. Raises ValueError where a
    save would lose or round a tensor.
    """
    from l2r.hf.checkpoints import (
        CheckpointCopy,
        checkpoint_folder,
        kept_files,
        load_model,
        load_tokenizer,
        save_model,
    )
    from l2r.hf.models import check_parts, check_whole, check_whole_weights
    from l2r.hf.swap import select_sites

    source, code = checkpoint_folder(folder), {"trust_remote_code": trust_remote_code}
    if trained:
        check_whole_weights(source, checkpoint)
    if kept:
        kept_files(source)  # refuses links before the weights are read
    copy: CheckpointCopy | None = None
    if placement is None:
        copy = CheckpointCopy.on_meta(folder, say, **code)
        model, tokenizer = copy.model, load_tokenizer(folder, **code)
    else:
        model, tokenizer = load_model(folder, placement=placement, **code)
        if kept and not trained:
            copy = CheckpointCopy(model, source)
    replaced = [site.path for site in select_sites(model, chosen)]
    if kept and not trained:
        check_parts(model, source, checkpoint)
    elif kept and placement is not None:
        rounded = placement.dtype != "auto"
        check_whole(model, source, checkpoint, replaced=replaced, rounded=rounded)

    def save(out: Path, report: Any, **more: Any) -> str:
        if copy is None:
            save_model(model, out, source=source, tokenizer=tokenizer, **more)
            return ""
        copy.save(out, tokenizer=tokenizer, report=report, **more)
        return str(copy.copied)

    return model, tokenizer, save


def _card(named: str, options: str, dtype: str, train_steps: int) -> str:
    """Section of the model card: how the checkpoint was made."""
    others = "its other tensors are unchanged, compared byte by byte."
    if train_steps:
        stored = "" if dtype == "auto" else f" and stored in {dtype}"
        others = f"its other weights were trained with them for {train_steps} steps{stored}."
    fitted = f"new routers into {named} and fitted them to its own; {others}"
    drawn = f"untrained routers into {named}; {others} Train it before use."
    return f"## How it was made\n\n`l2r swap{options}` put {fitted if options else drawn}"


def _opening(model: Any, out: Path) -> str:
    """Return the call that opens a model in a folder, which may have brought its code."""
    from l2r.hf.models import names_model_code

    has_code = names_model_code(getattr(model.config, "auto_map", None))
    code = ", trust_remote_code=True" if has_code else ""
    return f"l2r.load_pretrained({str(out)!r}{code})"


def _print(table: Table, fitted: "FitReport | None", kind: str, *, as_json: bool) -> None:
    """Print the routers of every layer, and how well new ones choose as the old ones did."""
    from l2r.cli.console import print_table
    from l2r.hf.swap import UNTRAINED_WARNING

    if fitted is None:
        print_table(table, as_json=as_json)
        echo(f"warning: {UNTRAINED_WARNING}", err=True)
    elif as_json:
        echo(plain_json({"routers": table.records(), **asdict(fitted)}))
    else:
        for shown in (table, *fit_tables(fitted, kind)):
            print_table(shown)


def _table(model: Any, before: "list[Site]", kind: str) -> Table:
    """Return a row per layer: the router that was there, and the one that is."""
    from l2r.routers import Router

    columns = (
        "layer",
        "module",
        "old router",
        "router",
        "old parameters",
        "parameters",
        "selection",
    )
    rows = []
    for site in before:
        router = model.get_submodule(site.path)
        family = isinstance(router, Router) and router.selection.family
        rows.append(
            (
                site.layer,
                site.path,
                type(site.router).__name__,
                "kept" if router is site.router else kind,
                sum(p.numel() for p in site.router.parameters()),
                sum(p.numel() for p in router.parameters()),
                f"that of {family}" if family else "own",
            )
        )
    changed = sum(row[3] != "kept" for row in rows)
    few = ("old router", "router", "old parameters", "parameters", "selection")
    verdict = f"{changed} of {len(rows)} routers are {kind} now."
    return Table("Routers", columns, tuple(rows), few=few, verdict=verdict)


def fit_to_old(
    checkpoint: Path,
    model: Any,
    tokenizer: Any,
    config: "RouterConfig",
    *,
    data: Path | None = None,
    tokens: int = 200_000,
    held_out: int = 50_000,
    length: int = 256,
    batch_size: int = 8,
    options: "FitOptions | None" = None,
    joint: "JointOptions | None" = None,
    layers: list[int] | None = None,
    selection: str = "family",
) -> "FitReport":
    """Replace the routers of ``model`` by fitted ones, with a progress bar.

    ``data`` is a folder of text, None for the embedded text. Raises ValueError as
    ``l2r.fitting.upcycling`` does.
    """
    from l2r.cli.console import progress_bars
    from l2r.fitting import upcycle
    from l2r.text import CorpusOptions, sample_batches, unseen_part

    batches, other = sample_batches(
        tokenizer,
        corpus=unseen_part(checkpoint, data) or CorpusOptions(str(data)),
        tokens=tokens,
        held_out_tokens=held_out,
        sequence_length=length,
        batch_size=batch_size,
        report=say,
    )
    with progress_bars() as report:
        return upcycle(
            model,
            config,
            batches,
            other,
            options=options,
            joint=joint,
            layers=layers,
            selection=selection,
            report=report,
        )


def _verdict(result: "FitReport") -> str:
    """Perplexity at the ends, and the mean agreement."""
    (first, before), *_, (last, after) = result.perplexity.items()
    agreed = sum(layer.agreement for layer in result.layers) / max(1, len(result.layers))
    return (
        f"Perplexity {before:.2f} ({first}), {after:.2f} ({last}); the new routers choose "
        f"{agreed:.0%} of the old routers' experts."
    )


def fit_tables(result: "FitReport", kind: str) -> tuple[Table, Table]:
    """Agreement and divergence per layer; perplexity per stage."""
    columns = ("layer", "agreement drawn", "agreement fitted", "KL drawn", "KL fitted")
    rows = [
        (f.layer, f.agreement_before, f.agreement, f.divergence_before, f.divergence)
        for f in result.layers
    ]
    agreement = Table(
        f"{kind}: agreement with the old routers",
        columns,
        tuple(rows),
        verdict=_verdict(result),
        caption="Share of a token's experts that old and new router both choose; held-out text.",
    )
    stages = tuple(result.perplexity.items())
    return agreement, Table(
        "Perplexity on held-out text", ("stage", "perplexity"), stages, digits=3
    )

"""Every Triton kernel compiled for GPUs that are not here: registers, shared memory, spills.

    python scripts/machines/compiled_kernels.py --out results/kernels

The launches are those of kernels/triton/launch.py, forward and backward, recorded on CPU tensors
and compiled instead of run: the same block sizes, dtypes and constants. NVIDIA's assembler is
Triton's own copy of ptxas; for AMD the numbers are LLVM's. Beside each launch stands the least time
it can take, the longer of bytes over bandwidth and arithmetic over its rate: every tensor of the
launch is read or written once, a product over 16 lanes and more is three tf32 products on NVIDIA's
matrix units, any other arithmetic is fp32, and an exponential counts as 16 operations, the ratio of
their rates. Launches themselves (a few microseconds each) are left out.
Writes compiled.json and compiled.md. Exit code 1 where a kernel does not compile.
"""

import argparse
import contextlib
import io
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

NVIDIA = {"sm_80": "a100", "sm_90": "h100", "sm_100": "b200"}
AMD = {"gfx942": "mi300x"}
TARGETS = NVIDIA | AMD
_EXPONENTIAL = 16


class Case(NamedTuple):
    """A router in training: T tokens, bf16 hidden states, fp32 parameters."""

    name: str
    tokens: int = 4096
    hidden: int = 2048
    experts: int = 64
    heads: int = 16
    rank: int = 2
    top_k: int = 8
    scoring: Any = "sips"
    gain: bool = True


CASES = (
    Case("L2R SIPS"),
    Case("L2R SIPS, 512 experts", experts=512, heads=4),
    Case("X-MoE", heads=1, rank=32, scoring="cosine", gain=False),
    Case("rank 16, 1024 experts", tokens=1024, hidden=1024, experts=1024, heads=4, rank=16),
    Case("linear, selection", rank=0),
)


class Launch(NamedTuple):
    """One recorded launch: the kernel, how it was called, its grid."""

    kernel: Any
    args: tuple[Any, ...]
    options: dict[str, Any]
    grid: tuple[int, ...]

    @property
    def name(self) -> str:
        return self.kernel.__name__.removesuffix("_kernel")

    def bytes(self) -> int:
        """Of all tensors that it was given, each once."""
        given: list[Any] = list(self.args)
        if self.name.endswith("_reduce"):  # of the parameters and their gradients alone
            given[:2] = [(a.weight, a.gain, a.anchors) for a in given[:2]]
        parts = [p for a in given for p in (a if isinstance(a, tuple) else [a])]
        return sum(p.numel() * p.element_size() for p in parts if isinstance(p, Tensor))

    @property
    def call(self) -> Any:
        """What it is told beside its tensors."""
        from l2r.kernels.triton.launch import Call

        return next(a for a in self.args if isinstance(a, Call))


def launches(case: Case) -> list[Launch]:
    """What a forward and a backward of the case launch, in their order."""
    from l2r.functional.scoring import ScoreConstants
    from l2r.kernels.contract import Options, Tensors
    from l2r.kernels.triton import launch

    tokens, hidden, experts, rank = case.tokens, case.hidden, case.experts, case.rank
    with _recorded() as found:
        if rank == 0:
            given = Tensors(logits=torch.empty(tokens, experts))
        else:
            given = Tensors(
                x=torch.empty(tokens, hidden, dtype=torch.bfloat16),
                weight=torch.empty(rank, hidden),
                gain=torch.empty(hidden) if case.gain else None,
                anchors=torch.empty(experts, case.heads, rank),
            )
        options = Options(ScoreConstants(case.scoring), case.top_k, save=True, need_x=True)
        done = launch.forward(given, options)
        assert done.logits is not None and done.weights is not None
        logits = torch.empty_like(done.logits) if rank else None
        up = Tensors(logits=logits, weights=torch.empty_like(done.weights))
        launch.backward(done, up, options)
    return found


@contextlib.contextmanager
def _recorded() -> Iterator[list[Launch]]:
    from triton.runtime.jit import JITFunction

    found: list[Launch] = []
    run = JITFunction.run

    def record(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        found.append(Launch(kernel, args, options, grid))

    JITFunction.run = record
    try:
        yield found
    finally:
        JITFunction.run = run


def compile_for(launch: Launch, target: str) -> dict[str, Any]:
    """Registers and spills of a thread, shared memory and threads of a program."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile, make_backend
    from triton.runtime.jit import create_function_from_signature

    if target in AMD:
        gpu = GPUTarget("hip", target, 64)
    else:
        gpu = GPUTarget("cuda", int(target.removeprefix("sm_")), 32)
    backend, kernel = make_backend(gpu), launch.kernel
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    given = {**launch.options, "debug": False}
    bound, specialization, options = bind(*launch.args, **given)
    options, signature, constants, attrs = kernel._pack_args(
        backend, given, bound, specialization, options
    )
    source = ASTSource(kernel, signature, constants, attrs)
    log = io.StringIO()
    with contextlib.redirect_stdout(log):
        made = compile(source, target=gpu, options=options.__dict__)
    threads = made.metadata.num_warps * gpu.warp_size
    if target in AMD:
        text = made.asm["amdgcn"]
        registers, spills = _number(text, r"\.vgpr_count:\s+(\d+)"), 0
        for kind in ("vgpr", "sgpr"):
            spills += 4 * _number(text, rf"\.{kind}_spill_count:\s+(\d+)")
    else:
        text = log.getvalue()
        registers = _number(text, r"Used (\d+) registers")
        spills = _number(text, r"(\d+) bytes spill stores") + _number(
            text, r"(\d+) bytes spill loads"
        )
    return {
        "registers": registers,
        "spills": spills,
        "shared": made.metadata.shared,
        "threads": threads,
    }


def _number(text: str, pattern: str) -> int:
    found = re.search(pattern, text)
    if found is None:
        raise ValueError(f"the compiler's output has no {pattern!r}: {text[-500:]!r}")
    return int(found.group(1))


def operations(case: Case, launch: Launch) -> tuple[float, float]:
    """Operations of products over the rank or D, and others with the exponentials."""
    tokens, hidden, experts, heads, rank = case[1:6]
    scores = tokens * experts * heads
    pooled = scores * _EXPONENTIAL if heads > 1 else 0
    match launch.name:
        case "forward":
            if case.rank == 0 or launch.call.R == 1 != rank:
                return 0, tokens * experts * (_EXPONENTIAL + 2 * case.top_k)
            given = launch.args[0]
            selects = given.weights is not None
            chosen = tokens * experts * (_EXPONENTIAL + 2 * case.top_k) if selects else 0
            scored = given.anchors is not None
            return 2 * rank * scores * scored, pooled * scored + chosen
        case "select_backward":
            return 0, tokens * experts * (_EXPONENTIAL + 2 * case.top_k)
        case "query_backward" | "anchors_backward":
            return 4 * scores * rank, pooled
        case "project" | "project_backward":
            passes = 2 if launch.name == "project_backward" else 1
            return 2 * passes * tokens * hidden * rank, 0
        case _:  # reductions
            return 0, launch.bytes() / 4


def least_seconds(case: Case, launch: Launch, gpu: str) -> float:
    """The longer of bytes over bandwidth and arithmetic over its rate."""
    from l2r_lab.planning.cut import GPUS

    card, (products, others) = GPUS[gpu], operations(case, launch)
    tensor_cores = case.rank > 4 and gpu != AMD["gfx942"]  # there they are fp32 products
    rate = card.flops / 2 / 3 if tensor_cores else card.wide_flops
    return max(launch.bytes() / card.bandwidth, products / rate + others / card.wide_flops)


def linear_seconds(case: Case, gpu: str) -> float:
    """A linear router of these sizes: three fp32 products; x read twice, its gradient written."""
    from l2r_lab.planning.cut import GPUS

    card, (tokens, hidden, experts) = GPUS[gpu], case[1:4]
    wide = 2 * tokens * hidden * experts / card.wide_flops
    rows, logits, weight = 2 * tokens * hidden, 4 * tokens * experts, 4 * experts * hidden
    moved = [rows + weight + logits, logits + weight + rows, rows + logits + weight]
    select = (6 * logits) / card.bandwidth  # softmax and top-k, forward and backward
    return sum(max(wide, part / card.bandwidth) for part in moved) + select


def measure(targets: list[str], cases: list[str]) -> list[dict[str, Any]]:
    """A record per case, launch and target; ``error`` where a kernel does not compile."""
    records = []
    for case in (c for c in CASES if not cases or c.name in cases):
        for number, launch in enumerate(launches(case)):
            for target in targets:
                record = {"case": case.name, "launch": number, "kernel": launch.name}
                record |= {"target": target, "grid": list(launch.grid), "bytes": launch.bytes()}
                record["operations"] = sum(operations(case, launch))
                record["least_us"] = 1e6 * least_seconds(case, launch, TARGETS[target])
                record["linear_us"] = 1e6 * linear_seconds(case, TARGETS[target])
                try:
                    record |= compile_for(launch, target)
                except Exception as problem:  # of any compiler stage: the table says it
                    record["error"] = f"{type(problem).__name__}: {problem}".splitlines()[0]
                print(json.dumps(record), file=sys.stderr, flush=True)
                records.append(record)
    return records


def markdown(records: list[dict[str, Any]]) -> str:
    """A table of resources and bounds, and one of whole routers beside linear ones."""
    targets = list(dict.fromkeys(r["target"] for r in records))
    head = ["case", "kernel", "grid", "MB", *targets, *(f"least us, {TARGETS[t]}" for t in targets)]
    lines = ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
    by_launch: dict[tuple[str, int], dict[str, Any]] = {}
    for r in records:
        by_launch.setdefault((r["case"], r["launch"]), {})[r["target"]] = r
    totals: dict[str, dict[str, float]] = {}
    for (case, _), of in by_launch.items():
        any_one = next(iter(of.values()))
        used = [
            r.get("error") or f"{r['registers']}, {r['shared'] / 1024:.1f} KB, {r['spills']} B"
            for r in of.values()
        ]
        least = [f"{r['least_us']:.2f}" for r in of.values()]
        grid = " x ".join(map(str, any_one["grid"]))
        row = [case, any_one["kernel"], grid, f"{any_one['bytes'] / 1e6:.2f}", *used, *least]
        lines.append("| " + " | ".join(row) + " |")
        for target, r in of.items():
            both = totals.setdefault(case, {})
            both[target] = both.get(target, 0.0) + r["least_us"]
            both[f"linear {target}"] = r["linear_us"]
    lines += ["", "| case, forward and backward | launches | " + " | ".join(targets) + " |"]
    lines += ["|" + " --- |" * (2 + len(targets))]
    for case, sums in totals.items():
        count = sum(1 for name, _ in by_launch if name == case)
        cells = [f"{sums[t]:.1f} ({sums[f'linear {t}']:.1f})" for t in targets]
        lines.append("| " + " | ".join([case, str(count), *cells]) + " |")
    return "\n".join(lines) + "\n"


def main() -> int:
    """Compile all, print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--targets", nargs="+", default=list(TARGETS), choices=list(TARGETS))
    parser.add_argument("--cases", nargs="*", default=[], choices=[case.name for case in CASES])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--records", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.records:
        # Decided where the kernels are imported: which GPU's compiler torch was built for.
        torch.version.hip = "compiled only" if given.targets[0] in AMD else None
        print(json.dumps(measure(given.targets, given.cases)))
        return 0
    records = []
    for kind in (NVIDIA, AMD):
        wanted = [target for target in given.targets if target in kind]
        if wanted:
            records += _in_a_process(wanted, given.cases)
    order = {case.name: number for number, case in enumerate(CASES)}
    records.sort(key=lambda r: (order[r["case"]], r["launch"]))
    table = markdown(records)
    print(table)
    if given.out is not None:
        given.out.mkdir(parents=True, exist_ok=True)
        (given.out / "compiled.json").write_text(json.dumps(records, indent=1) + "\n")
        (given.out / "compiled.md").write_text(table)
    return int(any("error" in record for record in records))


def _in_a_process(targets: list[str], cases: list[str]) -> list[dict[str, Any]]:
    command = [sys.executable, __file__, "--records", "--targets", *targets, "--cases", *cases]
    with tempfile.TemporaryDirectory() as cache:
        settings = {"TRITON_CACHE_DIR": cache, "TRITON_DUMP_PTXAS_LOG": "1"}
        settings["TRITON_ALWAYS_COMPILE"] = "1"  # what comes from the cache has no log
        environment = {**os.environ, **settings}
        environment.pop("TRITON_INTERPRET", None)
        done = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE)
    return json.loads(done.stdout)


if __name__ == "__main__":
    sys.exit(main())

"""Every family in vLLM, by each way: ``python -m scripts.others.vllm_families --vllm PYTHON``.

Makes small trained models of each family, swaps and fits their routers (checkpoints.py), and asks
vLLM, in the environment of PYTHON, for answers: our plug-in with the folder of ``l2r swap``, and
vLLM's Transformers backend with the exported one, in float32; the plug-in in bfloat16, beside
vLLM's own stock model; adapters; with the experts recorded. Each is compared with transformers in
float32. Goes on where it was stopped; ``--markdown`` writes the table into a file. Exits with 1
where a row of ``MUST`` is not as in transformers.
"""

import argparse
import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import PeftModel

from l2r import record, replay
from l2r.hf.checkpoints import export_remote_code, load_causal_lm
from l2r.hf.routes import Routes, from_vllm
from l2r.hf.routes.layers import fingerprint_of
from l2r.hf.swap import find_sites
from scripts.others.vllm_families.checkpoints import SIZES, make, names_of, prompts

HERE = Path(__file__).parent
NEW, MINUTES, TOGETHER = 64, 15, 4  # rows that share a process of vLLM
TOLERANCE = 1e-4  # of a log-probability, both in float32
# Rows whose models are trained and fitted and have all jobs, and rows that must be as wanted.
TRAINED = (
    "mixtral", "qwen3_moe", "qwen3_moe, not normalized", "olmoe", "olmoe, normalized", "glm4_moe",
    "gpt_oss", "granitemoe", "deepseek_v3",
)  # fmt: skip
MUST = (*TRAINED[:-1], "qwen2_moe", "granitemoeshared")
JOBS: Mapping[str, Mapping[str, Any]] = {
    "plug-in": {"folder": "swapped", "dtype": "float32", "routes": True},
    "backend": {"folder": "exported", "dtype": "float32", "impl": "transformers"},
    "plug-in-bf16": {"folder": "swapped", "dtype": "bfloat16", "routes": True},
    "stock-bf16": {"folder": "stock", "dtype": "bfloat16"},
    "stock": {"folder": "stock", "dtype": "float32"},
    "stock-backend": {"folder": "stock", "dtype": "float32", "impl": "transformers"},
    "lora": {"folder": "swapped", "dtype": "float32", "lora": "lora"},
    "lora-routers": {"folder": "swapped", "dtype": "float32", "lora": "lora-routers"},
    "merged": {"folder": "merged", "dtype": "float32"},
}
LATER = "stock-backend"  # asked where the exported folder's answers in the backend are others
BRIEF = ("plug-in", "backend", "stock")  # of rows that are not in ``TRAINED``
WHOLE = ("swapped", "stock", "lora", "merged")
START, END = "<!-- vllm families -->", "<!-- end of vllm families -->"


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts.others.vllm_families", description=__doc__)
    parser.add_argument("families", nargs="*", help="rows (default: all)")
    parser.add_argument("--vllm", type=Path, required=True, help="python of vLLM's environment")
    parser.add_argument("--out", type=Path, default=Path("runs/vllm-families"))
    parser.add_argument("--steps", type=int, default=200, help="of training, before the swap")
    parser.add_argument("--markdown", type=Path, help="file with the marks of the table")
    options = parser.parse_args()
    names, rows = names_of(options.families), {}
    for start in range(0, len(names), TOGETHER):
        some = names[start : start + TOGETHER]
        missing = [name for name in some if not (folder(name, options) / "row.json").exists()]
        wanted = {name: prepared(name, options) for name in missing}
        ask(wanted, options)
        other = {name: found for name, found in wanted.items() if differs(name, options)}
        ask(other, options, later=True)
        for name in some:
            rows[name] = row(name, wanted.get(name), options)
            print(f"{name}: {json.dumps(rows[name])}", flush=True)
    if options.markdown:
        for name in SIZES:  # those of earlier calls
            if (folder(name, options) / "row.json").exists():
                rows[name] = row(name, None, options)
        write({name: rows[name] for name in SIZES if name in rows}, options.markdown)
    return int(any(name in MUST and not is_as_wanted(found) for name, found in rows.items()))


def folder(name: str, options: argparse.Namespace) -> Path:
    """Of a row."""
    out: Path = options.out / name.replace(", ", "-").replace(" ", "-")
    return out


def prepared(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Make the models of a row; returns transformers' answers, or {"error": line}."""
    out = folder(name, options)
    out.mkdir(parents=True, exist_ok=True)
    made = out / "made.json"
    try:
        if not made.exists():
            made.write_text(json.dumps(make(name, out, options.steps if whole(name) else 0)))
        if not (out / "exported").exists():
            export_remote_code(load_causal_lm(out / "swapped")[0], out / "exported")
        return expected(out, texts(name), WHOLE if whole(name) else WHOLE[:2])
    except Exception as error:  # the other rows are worth having
        return {"error": f"{type(error).__name__}: {str(error).splitlines()[0]}"}


def row(name: str, wanted: dict[str, Any] | None, options: argparse.Namespace) -> dict[str, Any]:
    """What was found of a family, in the file ``row.json`` of its folder; None reads that."""
    out = folder(name, options)
    done = out / "row.json"
    if wanted is None:
        return dict(json.loads(done.read_text()))
    found = wanted
    if "error" not in wanted:
        found = {"losses": json.loads((out / "made.json").read_text())}
        found |= compared(out, wanted, load_causal_lm(out / "swapped")[0])
    done.write_text(json.dumps(found))
    return found


def whole(name: str) -> bool:
    """Whether a row's model is trained and fitted and has every job."""
    return name in TRAINED


def texts(name: str) -> list[list[int]]:
    """Prompts of a row."""
    return prompts(16 if whole(name) else 4)


def expected(out: Path, given: list[list[int]], names: Sequence[str]) -> dict[str, Any]:
    """Greedy tokens of transformers after the prompts, and the log-probabilities of all tokens."""
    file = out / "expected.json"
    found = dict(json.loads(file.read_text())) if file.exists() else {}
    for name in names:
        if name in found:
            continue
        model: Any = load_causal_lm(out / ("stock" if name == "stock" else "swapped"))[0].eval()
        if name == "merged":
            other = load_causal_lm(out / "swapped")[0]
            other = PeftModel.from_pretrained(other, out / "lora-routers")
            other.merge_and_unload().save_pretrained(out / name)
        if name in ("lora", "merged"):
            adapter = "lora-routers" if name == "merged" else name
            model = PeftModel.from_pretrained(model, out / adapter).eval()
        answers = [continued(model, ids) for ids in given]
        forced = [[*ids, *new] for ids, new in zip(given, answers, strict=True)]
        scores = [scored(model, ids) for ids in forced]
        found[name] = {"tokens": answers, "forced": forced, "scores": scores}
    file.write_text(json.dumps(found))
    return found


@torch.no_grad()
def continued(model: Any, ids: list[int]) -> list[int]:
    found = model.generate(
        input_ids=torch.tensor([ids]),
        attention_mask=torch.ones(1, len(ids), dtype=torch.long),
        max_new_tokens=NEW,
        min_new_tokens=NEW,
        do_sample=False,
    )
    return list(found[0, len(ids) :].tolist())


@torch.no_grad()
def scored(model: Any, ids: list[int]) -> list[float]:
    """Log-probabilities of all tokens but the first."""
    batch = torch.tensor([ids])
    scores = model(input_ids=batch).logits[0, :-1].double().log_softmax(-1)
    return list(scores.gather(1, batch[0, 1:, None])[:, 0].tolist())


def ask(
    rows: Mapping[str, Mapping[str, Any]], options: argparse.Namespace, *, later: bool = False
) -> None:
    """Run the jobs of some rows in vLLM; one that ends the process is left out of the next."""
    jobs = {}
    for name, wanted in rows.items():
        out = folder(name, options).resolve()
        for job, settings in JOBS.items():
            now = job == LATER if later else job in BRIEF or (whole(name) and job != LATER)
            if "error" in wanted or not now:
                continue
            lora = {"lora": str(out / settings["lora"])} if "lora" in settings else {}
            tokens = {"prompts": texts(name), "forced": wanted[reference(settings)]["forced"]}
            place = {"folder": str(out / settings["folder"])}
            stock = {"stock": settings["folder"] == "stock"}
            jobs[f"{out.name}/{job}"] = {**settings, **lora, **tokens, **place, **stock}
    file = options.out / "jobs.json"
    file.write_text(json.dumps(jobs))
    for _ in jobs:
        waiting = [job for job in jobs if not (options.out / f"{job}.json").exists()]
        if not waiting:
            return
        with (options.out / "vllm.log").open("a") as log:
            done = subprocess.run(
                [options.vllm, HERE / "in_vllm.py", file, options.out],
                stdout=log,
                stderr=log,
                check=False,
                timeout=60 * MINUTES * len(jobs),
                env={"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", **os.environ},
            )
        for job in waiting:
            if not (options.out / f"{job}.json").exists():
                ended = {"error": f"vLLM's process ended with {done.returncode}"}
                (options.out / f"{job}.json").write_text(json.dumps(ended))
                break


def differs(name: str, options: argparse.Namespace) -> bool:
    """Whether the backend gave no answer to the exported folder of a row, or another."""
    out = folder(name, options)
    if not (out / "backend.json").exists():
        return False
    answer = json.loads((out / "backend.json").read_text())
    wanted = json.loads((out / "expected.json").read_text())["swapped"]
    return "error" in answer or largest(answer["scores"], wanted["scores"]) > TOLERANCE


def reference(settings: Mapping[str, Any]) -> str:
    """Whose answers in transformers a job's are compared with."""
    return "lora" if "lora" in settings else settings["folder"].replace("exported", "swapped")


def compared(out: Path, wanted: Mapping[str, Any], swapped: Any) -> dict[str, Any]:
    """Of each job the answers that are equal and the largest difference, or the error."""
    found: dict[str, Any] = {}
    for job, settings in JOBS.items():
        if not (out / f"{job}.json").exists():
            continue
        answer = json.loads((out / f"{job}.json").read_text())
        if "error" in answer:
            found[job] = {"error": answer["error"]}
            continue
        source = wanted[reference(settings)]
        pairs = zip(answer["tokens"], source["tokens"], strict=True)
        found[job] = {
            "equal": sum(one == other for one, other in pairs),
            "prompts": len(source["tokens"]),
            "largest": largest(answer["scores"], source["scores"]),
            "class": answer["architectures"][0],
        }
        if settings.get("routes"):
            with np.load(out / f"{job}.npz") as file:
                arrays = dict(file)
            found[job] |= choices(arrays, swapped)
            found[job] |= routes(arrays, source["forced"], answer["scores"], swapped)
    return found


def largest(one: list[list[float]], other: list[list[float]]) -> float:
    return max(
        abs(a - b) for x, y in zip(one, other, strict=True) for a, b in zip(x, y, strict=True)
    )


@torch.no_grad()
def choices(arrays: Mapping[str, np.ndarray], swapped: Any) -> dict[str, Any]:
    """Our routers in transformers on the hidden states that vLLM's gates read.

    Largest difference of a logit and of a weight, and how many of the choices differ.
    """
    logits, weights, other, total = 0.0, 0.0, 0, 0
    for site in find_sites(swapped):
        if f"{site.layer}/hidden" not in arrays:
            continue
        seen = {key: torch.from_numpy(arrays[f"{site.layer}/{key}"]) for key in
                ("hidden", "logits", "weights", "experts")}  # fmt: skip
        block = swapped.get_submodule(site.path.rpartition(".")[0])
        bias = getattr(block, "e_score_correction_bias", getattr(block, "expert_bias", None))
        own = site.router(seen["hidden"], *([bias] if site.selection.block_bias else []))
        count = own.logits.shape[1]
        order = [
            by_expert(own.weights, own.indices, count),
            by_expert(seen["weights"], seen["experts"], count),
        ]
        logits = max(logits, float((own.logits - seen["logits"]).abs().max()))
        weights = max(weights, float((order[0] - order[1]).abs().max()))
        other += int(((order[0] != 0) != (order[1] != 0)).any(1).sum())
        total += len(own.logits)
    return {"gates": {"logits": logits, "weights": weights, "differ": other, "choices": total}}


def by_expert(weights: torch.Tensor, experts: torch.Tensor, count: int) -> torch.Tensor:
    table = torch.zeros(len(weights), count)
    return table.scatter(1, experts.long(), weights.float())


@torch.no_grad()
def routes(
    arrays: Mapping[str, np.ndarray], forced: list[list[int]], scores: list[list[float]], model: Any
) -> dict[str, Any]:
    """Decisions that differ from transformers', and what replaying vLLM's leaves of the rest."""
    rows = [arrays[f"{n:03}"][: len(ids) - 1] for n, ids in enumerate(forced)]
    theirs = from_vllm(rows, fingerprint_of(model))
    own, replayed = [], []
    for number, ids in enumerate(forced):
        with record(model) as recorder:
            model(input_ids=torch.tensor([ids]))
        own.append(recorder.routes())
        with replay(model, theirs[number]):
            replayed.append(scored(model, ids))
    agreement = Routes.concatenate(own).agreement(theirs)
    return {
        "decisions": float(1 - agreement.layers.mean()),
        "compared": agreement.compared,
        "replayed": largest(scores, replayed),
    }


def is_as_wanted(found: Mapping[str, Any]) -> bool:
    """Whether both the plug-in and the routes are as in transformers."""
    plug = found.get("plug-in", {})
    same = plug.get("equal") == plug.get("prompts", 0) > 0 and plug.get("decisions") == 0
    return bool(same and plug["largest"] <= TOLERANCE)


HEAD = (
    "family", "plug-in", "Transformers backend", "stock in vLLM", "plug-in, bf16", "stock, bf16",
    "stock in the backend", "choices, replay in bf16", "adapter of the attention",
    "adapter with routers", "merged", "loss",
)  # fmt: skip


def write(rows: Mapping[str, Mapping[str, Any]], file: Path) -> None:
    """Put the table between its marks in a file."""
    lines = [f"| {' | '.join(HEAD)} |", f"|{' --- |' * len(HEAD)}"]
    lines += [f"| {' | '.join(cells(name, found))} |" for name, found in rows.items()]
    text = file.read_text()
    before, after = text.partition(START)[0], text.partition(END)[2]
    file.write_text(f"{before}{START}\n" + "\n".join(lines) + f"\n{END}{after}")


def cells(name: str, found: Mapping[str, Any]) -> list[str]:
    if "error" in found:
        return [name, cell(found), *[""] * (len(HEAD) - 2)]
    jobs = ("plug-in", "backend", "stock", "plug-in-bf16", "stock-bf16")
    plug, losses = found.get("plug-in-bf16", {}), found["losses"]
    order = ("stock", "swapped", "fitted", "other experts")
    loss = " / ".join(f"{losses[key]:.2f}" for key in order) if whole(name) else ""
    routed = ""
    if "decisions" in plug:
        routed = f"{plug['decisions']:.1%} differ; {plug['largest']:.2g}"
        routed += f", replayed {plug['replayed']:.2g}"
    return [
        name,
        *(cell(found.get(job), gates=job == "plug-in") for job in jobs),
        cell(found.get(LATER)),
        routed,
        cell(found.get("lora")),
        cell(found.get("lora-routers")),
        cell(found.get("merged")),
        loss,
    ]


def cell(found: Mapping[str, Any] | None, *, gates: bool = False) -> str:
    """Answers that are equal and the largest difference, or why there are none.

    With ``gates`` and answers that differ, the choices from the same hidden states.
    """
    if found is None:
        return ""
    if "error" in found:
        line = re.sub(r"/\S+/", "", str(found["error"]))  # paths of this machine
        said = line.replace("|", "/").split(". ")
        return [part for part in said if not part.startswith(("Please ", "This ", "Its "))][-1]
    count = found.get("prompts", 16)
    text = f"{found['equal']} of {count}, {found['largest']:.1e}"
    if gates and "gates" in found and not found["largest"] <= TOLERANCE:
        seen = found["gates"]
        text += f"; on equal hidden states {seen['differ']} of {seen['choices']} choices differ"
    return text


if __name__ == "__main__":
    sys.exit(main())

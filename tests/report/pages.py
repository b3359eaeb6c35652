"""Every page that the package writes, in its smallest size, from results made by hand."""

import numpy as np

from l2r.analysis.diagnostics.landscape import drawn_anchors
from l2r.files.arrays import PatchRouting
from l2r.files.diagnosis import Diagnosis
from l2r.report.check import write_check
from l2r.report.diagnosis import write_diagnosis
from l2r.report.mismatch import write_mismatch
from l2r.report.page import Section
from l2r.report.patches import patch_links, write_patch_page
from l2r.report.text_view import text_sections
from l2r_lab.report.ablation import seed_row
from l2r_lab.report.comparison import write_report
from l2r_lab.report.evidence import write_study
from l2r_lab.report.explorer import write_explorer
from l2r_lab.report.landscape import landscapes_2d, landscapes_3d
from l2r_lab.report.sweep import write_sweep_page
from l2r_lab.studies.judging import study_of
from l2r_lab.studies.registration import RegisteredPlan
from l2r_lab.studies.study_plan import StudyPlan
from tests.files.test_mismatch import small
from tests.l2r_lab.studies.studies import SMALL, made_up
from tests.report.findings import FINDINGS
from tests.report.runs import made_run
from tests.report.texts import random_text

EXPERTS, LAYERS, TOKENS = 6, 2, 40


def made_diagnosis(seed=0):
    """A diagnosis of random numbers with the arrays that figures read."""
    draw = np.random.default_rng(seed)
    arrays, layers = {}, []
    for layer in range(LAYERS):
        use = draw.random((2, EXPERTS))
        first = draw.integers(0, EXPERTS, TOKENS)
        found = {
            **{kind: draw.random(EXPERTS) for kind in ("topk", "importance")},
            "top1": draw.random(EXPERTS) * (np.arange(EXPERTS) > 1),
            "usage_by_domain": use / use.sum(1, keepdims=True),
            "sample_x": draw.normal(size=(TOKENS, 8)),
            "sample_query": draw.normal(size=(TOKENS, 2)),
            "sample_first": first,
            "plane_axis": np.linspace(-3, 3, 9),
            "plane_first": draw.integers(0, EXPERTS, (9, 9)),
            "anchors": draw.normal(size=(EXPERTS, 2, 2)),
            "coactivation": draw.random((EXPERTS, EXPERTS)),
            "experts": draw.integers(0, EXPERTS, (4, 10, 2)),
        }
        for decision in ("top1", "topk"):
            found[f"certified_{decision}"] = draw.exponential(size=8)
            found[f"found_{decision}"] = found[f"certified_{decision}"] + 0.1
        arrays |= {f"{layer}.{name}": value for name, value in found.items()}
        row = {"name": f"model.layers.{layer}.mlp.gate", "cosine_variance": draw.random()}
        for name in ("mean_margin", "low_margin_rate", "stability", "topk_overlap"):
            value = float(draw.random())
            row |= {name: value, f"{name}_interval": [value - 0.01, value + 0.01]}
        for name in ("scale_free_margin", "entropy", "certified_top1", "domain_specialization",
                     "coactivation_by_chance", "vocabulary_input"):  # fmt: skip
            row[name] = float(draw.random())
        layers.append(row)
    settings = {"sigma": 0.02, "certify": 8}
    info = {
        "experts": EXPERTS, "domains": ["speeches", "code"], "tokens": TOKENS, "sampled": TOKENS,
        "settings": settings, "data": "digest", "paths": [[[0, 1], 7], [[2, 3], 5]],
        "model": {"routing_gain": 0.12, "shuffled_gain": 0.2, "cross_entropy": 5.2},
        "over_time": {
            "checkpoints": [1, 2], "top1": [[0.4, 0.5], [1, 1]], "topk": [[0.5, 0.6], [1, 1]],
        },
    }  # fmt: skip
    return Diagnosis(info, layers, arrays)


def _patches():
    draw = np.random.default_rng(0)
    place = (LAYERS, 2, 2, 2, 2)
    return PatchRouting(
        layers=np.array([f"vit.layers.{n}.mlp.router" for n in (2, 3)]),
        classes=np.array(["zero", "one"]),
        images=draw.integers(0, 255, (2, 8, 8, 1)).astype(np.uint8),
        labels=np.array([0, 1]),
        predictions=np.array([0, 0]),
        experts=draw.integers(0, EXPERTS, place).astype(np.int16),
        weights=draw.random(place).astype(np.float32),
        num_experts=np.array(EXPERTS),
        class_token=draw.integers(0, EXPERTS, (LAYERS, 2, 2)).astype(np.int16),
    )


def _report(folder):
    for number, name in enumerate(("linear", "l2r_sips", "l2r_sips_tuned")):
        run = made_run(folder / "runs" / name, ce=5.7 + 0.01 * number)
        made_diagnosis(number).save(run.path)
        random_text(seed=number).save(run.text)
    from l2r.files.folder import find_runs

    _, pages = write_report(find_runs(folder / "runs"), folder / "report.html")
    return dict(zip(("report", "text"), pages, strict=True))


def _study(folder):
    pair = {"first": "l2r", "second": "linear", "better": "smaller"}
    contrasts = [
        {**pair, "metric": "validation_ce", "primary": True},
        {**pair, "metric": "load_entropy", "better": "larger"},
    ]
    plan = {**SMALL, "contrasts": contrasts, "margins": {"validation_ce": 0.02}}
    registered = RegisteredPlan(StudyPlan.model_validate(plan), "small", "d", "c", "registered")
    noise = (0.0, 0.002, -0.001)

    def value(arm, seed, name, trained):
        return 5 + 0.1 * seed + (arm == "l2r") * (noise[seed] + 0.05 * trained)

    study = study_of(registered, made_up(registered, 3, value))
    return {"study": write_study(study, folder / "study", folder / "texts")[0]}


def _sweep(folder):
    rows = []
    for rank in (2, 4):
        run = made_run(folder / "sweep" / f"rank={rank}", ce=5.7 + 0.01 * rank)
        made_diagnosis(rank).save(run.path)
        rows.append(seed_row({"router.rank": rank}, [run]))
    return {"sweep": write_sweep_page(rows, folder / "sweep.html", failed={"rank=8": "no memory"})}


def _explorer(folder):
    axis = np.linspace(-2, 2, 7)
    grid = np.add.outer(axis, axis)
    figures = [
        Section("Score over the plane", "", [landscapes_2d(axis, {"dot": grid}, (1.0, 1.0))]),
        Section("Surfaces", "", [landscapes_3d(axis, {"dot": grid, "SIPS": grid})]),
    ]
    sets = [drawn_anchors(0)]
    page = write_explorer(
        folder / "explorer.html", sets, title="Score explorer", reach=4.0, figures=figures
    )
    return {"explorer": page}


def every_page(folder):
    """Name -> path."""
    views = {"linear": made_diagnosis(0), "l2r_sips": made_diagnosis(1)}
    page = folder / "diagnosis.html"
    vision = folder / "vision"
    vision.mkdir(parents=True)
    patches = write_patch_page(vision, _patches(), "L2rViT")
    texts = {name: random_text(seed=n) for n, name in enumerate(views)}
    opening = [*text_sections(texts, page), *patch_links([patches], folder)]
    found = {"diagnosis": write_diagnosis(views, page, texts=texts, opening=opening)}
    found["patches"] = patches
    found["check"] = write_check(folder / "check.html", "mine", FINDINGS)
    found["mismatch"] = write_mismatch(folder / "mismatch.html", small(), name="a", against="bf16")
    for make in (_report, _study, _sweep, _explorer):
        found |= make(folder)
    return found

"""The table of CHANGELOG.md from module paths of 0.3.0 to those of today."""

import re
from functools import cache
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
TABLE = TEXT.partition("### Where modules went")[2].partition("\n## ")[0]
# Modules of 0.3.0 with the names that pages, notebooks and the README of 0.3.0 imported from them.
PROMISED = {
    "l2r.training": ("train",),
    "l2r.training.recipes": ("load_recipe",),
    "l2r.training.data": ("TokenDataset", "load_tokenizer", "write_token_files"),
    "l2r.training.evaluation": ("evaluate_tasks", "paper_row"),
    "l2r.routers": ("update_selection_bias",),
    "l2r.hf.swap": ("router_sites", "selection_biases", "freeze_routers", "train_routers_only"),
    "l2r.hf.routes": ("from_vllm", "to_vllm", "from_verl", "fingerprint_of"),
    "l2r.hf.models": ("L2rOlmoeForCausalLM", "L2rViTConfig", "L2rViTForImageClassification"),
    "l2r.hf.checkpoints": ("load_causal_lm", "save_model"),
    "l2r.functional": ("load_balancing_loss", "router_z_loss", "expert_counts"),
    "l2r.engines.trainer": ("add_router_losses", "add_router_statistics"),
    "l2r.engines.trainer.route_replay": ("add_route_replay",),
    "l2r.engines.trainer.lightning": ("router_statistics_callback",),
    "l2r.analysis": ("Extent", "diagnose_checkpoint"),
    "l2r.analysis.diagnostics": (
        "DiagnosisSettings", "collect_records", "diagnose_layers", "router_statistics",
    ),
    "l2r.analysis.diagnostics.checks": ("check_model", "Finding"),
    "l2r.analysis.routes.arithmetic": ("in_other_arithmetic",),
    "l2r.analysis.certificates.lipschitz": (),
    "l2r.report.routing": ("usage_by_layer", "usage_by_domain"),
    "l2r.report.geometry": ("routing_planes",),
    "l2r.report.diagnosis": ("write_diagnosis",),
    "l2r.moe": ("MoELayer", "Experts"),
    "l2r.training.language": (), "l2r.training.objective": (), "l2r.training.data.olmoe_mix": (),
    "l2r.training.recipes.load": (), "l2r.training.recipes.schema": (),
    "l2r.training.recipes.vision_schema": (), "l2r.training.evaluation.downstream": (),
    "l2r.training.evaluation.paper_rows": (), "l2r.training.evaluation.task_scoring": (),
    "l2r.routers.zoo": (), "l2r.runs.diagnosis": (), "l2r.runs.text_routing": (),
    "l2r.cost.benchmarks.inference": (), "l2r.report.curves": (), "l2r.report.ablation": (),
    "l2r.report.sweep": (), "l2r.report.landscape": (), "l2r.report.paper_tables": (),
}  # fmt: skip


def moves() -> list[tuple[list[str], list[str], list[str]]]:
    """Rows of the table: paths of 0.3.0, paths of today, names that moved."""
    rows = re.findall(r"^\| (`.+?) \| (`.+?) \| (.*?) ?\|$", TABLE, re.M)
    return [tuple(re.findall(r"`([\w.]+)`", cell) for cell in row) for row in rows]


@cache
def exists(module: str) -> bool:
    place = (ROOT / "src").joinpath(*module.split("."))
    return place.with_suffix(".py").is_file() or (place / "__init__.py").is_file()


def missing(module: str, names: list[str] | tuple[str, ...]) -> list[str]:
    """What of a path does not import: the module itself, or names of it."""
    if not exists(module):
        return [module]
    found = import_module(module)
    return [f"{module}.{name}" for name in names if not hasattr(found, name)]


def test_every_path_of_the_table_imports():
    rows = moves()
    assert len(rows) > 25
    wrong = [w for _, new, names in rows for module in new for w in missing(module, names)]
    assert not wrong, "\n".join(wrong)


def test_paths_of_the_table_are_gone_or_lack_the_names_that_moved():
    wrong = [
        f"{module} still has {name or 'its place'}"
        for old, _, names in moves()
        for module in old
        if exists(module)
        for name in names or [""]
        if not missing(module, [name] if name else [])
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("module", PROMISED)
def test_what_pages_of_0_3_0_imported_stayed_or_stands_in_the_table(module):
    names = PROMISED[module]
    lost = missing(module, names)
    if lost == [module]:
        lost = [f"{module}.{name}" for name in names] or [module]
    moved = {
        f"{old}.{name}" for olds, _, all_names in moves() for old in olds for name in all_names
    } | {old for olds, _, _ in moves() for old in olds}
    assert not set(lost) - moved, sorted(set(lost) - moved)


def test_a_path_that_leads_nowhere_is_seen():
    assert missing("l2r.runs.folder", []) == ["l2r.runs.folder"]
    assert missing("l2r.text", ["TokenDataset", "gone"]) == ["l2r.text.gone"]


def test_unreleased_has_the_four_sections_in_their_order():
    newest = re.split(r"^## ", TEXT, flags=re.M)[1]
    titles = re.findall(r"^### (.+)$", newest, re.M)
    allowed = ["Added", "Changed", "Fixed", "Removed", "Where modules went"]
    assert titles == [title for title in allowed if title in titles], titles

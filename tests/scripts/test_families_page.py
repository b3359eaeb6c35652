"""docs/swap.md names every family with the checks that it passes."""

import re

import pytest

from l2r.hf.swap.families import FAMILIES, REFUSED
from scripts.pages import architectures, families_page, recognized
from tests.hf.family_check import COLUMNS, FamilyResult, check_families
from tests.hf.family_sizes import OWN_SIZES
from tests.hf.swap.test_recognition import taken_out

__all__ = ["taken_out"]


def test_the_page_names_every_family_and_the_reason_of_every_refusal():
    text = families_page.PAGE.read_text(encoding="utf-8")
    supported = text.split("### Supported")[1].split("### Refused")[0].split("\nNo `")[0]
    rows = [row.split(" | ")[-1] for row in supported.splitlines() if row.startswith("| `")]
    assert sorted(re.findall(r"`(\w+)`", " ".join(rows))) == sorted(OWN_SIZES)
    assert f"None of the {len(OWN_SIZES)} families fails" in text and "| no |" not in text
    assert set(FAMILIES) <= set(OWN_SIZES)
    assert all(f": {reason}." in text for reason in REFUSED.values())


def test_a_check_that_failed_is_a_no_on_the_page():
    checks = dict.fromkeys(COLUMNS[1:], True)
    failed = FamilyResult("olmoe", **{**checks, "compile": False})
    silent = FamilyResult("mixtral", **{**checks, "generate": None})
    text = families_page.section([failed, silent], [])
    assert "| olmoe | yes | yes | yes | yes | yes | no |" in text
    assert "1 of 2 families pass" in text and "| mixtral |" not in text
    assert "No `generate` for `mixtral`: it classifies tokens." in text


def test_an_unknown_family_is_refused():
    with pytest.raises(ValueError, match="family must be one of olmoe"):
        next(check_families(["gpt2"]))


def test_every_moe_architecture_of_transformers_was_looked_at():
    found = {a.name: a for a in architectures.architectures()}
    assert [name for name, a in found.items() if a.state == architectures.NEW] == []
    assert {f for a in found.values() for f in a.families} == set(FAMILIES)
    assert "llama" not in found and "gpt2" not in found
    assert found["llama4"].state == "refused" and found["llama4"].why == REFUSED["llama4"]


@pytest.mark.parametrize(
    ("modeling", "configuration", "why"),
    [
        ("class NewTopkRouter:\n    top_k = 2\nclass NewExperts: pass\n", "", "NewTopkRouter"),
        ("class NewMoE: pass\n", "", "no router class"),
        ("", "class NewConfig:\n    n_routed_experts: int = 8\n", "no router class"),
    ],
)
def test_an_architecture_in_no_table_is_not_looked_at(tmp_path, modeling, configuration, why):
    for name in ("new", "dense"):
        (tmp_path / name).mkdir()
    (tmp_path / "new" / "modeling_new.py").write_text(modeling)
    (tmp_path / "new" / "configuration_new.py").write_text(configuration)
    (tmp_path / "dense" / "modeling_dense.py").write_text("class DenseMLP: pass\n")
    (found,) = architectures.architectures(tmp_path)
    assert (found.name, found.state, found.why) == ("new", architectures.NEW, why)


def test_a_second_router_of_a_supported_architecture_is_new(tmp_path):
    (tmp_path / "olmoe").mkdir()
    classes = "class OlmoeTopKRouter:\n    top_k = 2\nclass OlmoeExperts: pass\n"
    source = tmp_path / "olmoe" / "modeling_olmoe.py"
    source.write_text(classes)
    assert architectures.architectures(tmp_path)[0].state == architectures.SUPPORTED
    source.write_text(classes + "class OlmoeVisionRouter:\n    top_k = 1\n")
    assert architectures.architectures(tmp_path)[0].why == "OlmoeVisionRouter"


@pytest.mark.slow("reads all of transformers twice")
def test_an_architecture_in_no_table_is_recognized_where_a_rule_gives_its_results(taken_out):
    """Mixtral and Qwen3-VL, whose text model has the router, as if they were new."""
    for name in ("mixtral", "qwen3_vl_moe"):
        taken_out(name)
        (found,) = (a for a in architectures.architectures() if a.name == name)
        assert found.state == architectures.NEW
        found = recognized.looked_at(found)
        assert found.state == architectures.RECOGNIZED
        assert re.fullmatch(r"behaves as \w+ on 4,\d+ tokens", found.why)
    page = families_page.section([], [found])
    assert "1 recognized" in page and f"- `qwen3_vl_moe`: {found.why}." in page


def test_an_architecture_that_cannot_be_built_small_stays_new():
    new = architectures.Architecture("llama4", architectures.NEW, why="Llama4Router")
    assert recognized.looked_at(new) == new

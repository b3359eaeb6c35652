"""The scripts around vLLM, without it: what the plug-in takes, and the table of families."""

import ast
import sys
from pathlib import Path

from scripts.others import vllm_signatures
from scripts.others.vllm_families.__main__ import END, START, write
from scripts.others.vllm_signatures import TAKEN, defined

ROOT = Path(__file__).resolve().parents[2]
SOURCE = """
from other import Runner
MAP: dict = {}
class Router:
    kind: str
    def choose(self, logits, *, input_ids=None): ...
def factory(num_experts, prefix=""): ...
"""


def test_names_and_parameters_are_read_from_source_alone():
    assert defined(ast.parse(SOURCE)) == {
        "Runner": [], "MAP": [], "Router": [], "Router.kind": [],
        "Router.choose": ["self", "logits", "input_ids"], "factory": ["num_experts", "prefix"],
    }  # fmt: skip


def test_a_parameter_that_is_gone_is_named(tmp_path, monkeypatch, capsys):
    wanted = {"layer.py": {"factory": ("prefix", "gate"), "MAP": (), "Gone": ()}}
    monkeypatch.setattr(vllm_signatures, "TAKEN", wanted)
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "layer.py").write_text(SOURCE)
    monkeypatch.setattr(sys, "argv", ["vllm_signatures.py", str(tmp_path)])
    assert vllm_signatures.main() == 1
    assert capsys.readouterr().out.splitlines() == [
        "layer.py: factory lacks ['gate']", "layer.py: MAP as taken", "layer.py: Gone is not there",
    ]  # fmt: skip


def test_every_name_that_the_plug_in_imports_is_looked_for():
    taken = {(file, name.partition(".")[0]) for file, names in TAKEN.items() for name in names}
    for path in (ROOT / "src/l2r/engines/vllm").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            module = getattr(node, "module", None) or ""
            if not isinstance(node, ast.ImportFrom) or not module.startswith("vllm."):
                continue
            place = module.removeprefix("vllm.").replace(".", "/")
            for name in node.names:
                if module == "vllm.platforms":  # current_platform is one of these
                    assert ("platforms/interface.py", "Platform") in taken
                    continue
                named = [(f"{place}{end}", name.name) in taken for end in (".py", "/__init__.py")]
                ends = (".py", "/__init__.py")
                whole = [f"{place}/{name.name}{end}" in TAKEN for end in ends]  # a module
                assert any(named + whole), (path, name.name)


def test_the_table_stands_between_its_marks_and_has_a_row_each(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(f"# Before\n{START}\nold\n{END}\nafter\n")
    losses = {"stock": 1.0, "swapped": 2.0, "fitted": 1.1, "other experts": 3.0}
    gates = {"logits": 0.0, "weights": 0.0, "differ": 0, "choices": 96}
    plug = {"equal": 0, "largest": 0.5, "gates": gates}
    rows = {
        "mixtral": {"losses": losses, "plug-in": {"equal": 16, "largest": 2e-6}},
        "deepseek_v3": {"losses": losses, "plug-in": plug},
        "jamba": {"error": "ValueError: no | sizes in /some/place/jamba"},
    }
    write(rows, page)
    lines = page.read_text().splitlines()
    assert (lines[0], lines[-1]) == ("# Before", "after") and "old" not in lines
    assert len({line.count("|") for line in lines if line.startswith("|")}) == 1
    assert "| mixtral | 16 of 16, 2.0e-06 |" in page.read_text()
    assert "| ValueError: no / sizes in jamba |" in page.read_text()
    assert "0 of 16, 5.0e-01; on equal hidden states 0 of 96 choices differ" in page.read_text()

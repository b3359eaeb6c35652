"""What docs/engines.md says to type is whole, and is run as it stands."""

import ast
import builtins
import re
from dataclasses import replace
from pathlib import Path

import pytest

from scripts.others.engine_page import PAGE, environments, run_page

ROOT = Path(__file__).resolve().parents[2]
WRITTEN = environments(PAGE.read_text(encoding="utf-8"))
SMALL = """
### An engine

<!-- not run: make engines -->
```bash
mkdir -p .engines/one/bin
ln -s "$(command -v python3)" .engines/one/bin/python
```

<!-- not run: make engines -->
```python
limit = 7
```

```python
never = run
```

<!-- not run: make engines -->
```python
print(f"logits differ by {limit:.1e} of the largest")
```

<!-- not run: make engines -->
```python
raise ValueError(f"at most {limit}")
```

## Servers
"""


@pytest.mark.parametrize("name", ["olmo-core", "megatron", "megatron-0.19", "torchtitan"])
def test_an_engine_has_an_install_line_with_our_pins_and_whole_snippets(name):
    steps = WRITTEN[name]
    extra = re.sub(r"-[\d.]+$", "", name)
    ours = any("l2r " in command for command in steps.commands)
    wanted = f"{extra},lm,cli,report" if ours else f"{extra},lm"
    assert f"-c constraints-engines.txt -e '.[{wanted}]'" in steps.install
    for text in ("\n".join(steps.snippets), *steps.files.values()):
        assert unbound(text) == [], name


def unbound(text):
    """Names that a program reads and never makes."""
    tree = ast.parse(text)
    names = [node for node in ast.walk(tree) if isinstance(node, ast.Name)]
    bound = {node.id for node in names if not isinstance(node.ctx, ast.Load)} | set(dir(builtins))
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            bound |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
        elif isinstance(node, ast.FunctionDef):
            bound.add(node.name)
        elif isinstance(node, ast.arg):
            bound.add(node.arg)
    return sorted({node.id for node in names} - bound)


def test_marked_blocks_run_in_order_until_one_fails(tmp_path):
    (steps,) = environments(SMALL).values()
    assert steps.name == "one" and len(steps.snippets) == 3 and not steps.commands
    result = run_page(steps, tmp_path)
    assert (result["snippets"], result["logits"]) == ("2 of 3", "7.0e+00")
    assert result["problem"] == "ValueError: at most 7"


def test_other_logits_after_export_are_a_problem(tmp_path):
    page = SMALL.replace("raise ValueError", "print")
    result = run_page(*environments(page).values(), tmp_path)
    assert result["snippets"] == "3 of 3"
    assert "logits after export must be within 1.0e-05 of the largest" in result["problem"]
    result = run_page(*environments(page.replace("limit = 7", "limit = 1e-6")).values(), tmp_path)
    assert (result["logits"], result["problem"]) == ("1.0e-06", "")


def test_pins_of_engines_are_ours_but_for_what_an_engine_holds_at_other_versions():
    ours, theirs = (
        set(re.findall(r"^[\w.-]+==.+$", (ROOT / name).read_text(), re.M))
        for name in ("constraints.txt", "constraints-engines.txt")
    )
    head = (ROOT / "constraints-engines.txt").read_text().split("\n\n")[0]
    names = set(re.findall(r"[\w-]+", head.split(" without ")[1].split(":")[0])) - {"and"}
    assert theirs <= ours and {line.split("==")[0] for line in ours - theirs} == names


RANKS = (
    SMALL.replace("raise ValueError", "print")
    + """
### Another

<!-- not run: make engines -->
```bash
mkdir -p .engines/two/bin
ln -s "$(command -v python3)" .engines/two/bin/python
```

<!-- not run: make engines -->
```python
# two_ranks.py
import sys
print(f"logits differ by {sys.argv[1]} of the largest")
```

<!-- not run: make engines -->
```bash
python two_ranks.py 3e-6
```

<!-- not run: make engines -->
```bash
python two_ranks.py 4e-7
command -v python
```
"""
)


def test_a_script_is_saved_and_its_commands_print_every_line(tmp_path, capfd):
    one, two = environments(RANKS).values()
    assert not one.files and list(two.files) == ["two_ranks.py"] and len(two.commands) == 2
    result = run_page(two, tmp_path)
    assert (result["snippets"], result["logits"], result["problem"]) == ("2 of 2", "3e-6", "")
    said = capfd.readouterr().out
    place = str(tmp_path / ".engines" / "two" / "bin" / "python")
    lines = ["python two_ranks.py 3e-6", "logits differ by 3e-6 of the largest", place]
    assert all(line in said.splitlines() for line in lines)
    assert result["minutes"] == "0 + 0" and result["size"].endswith(" GB")
    failing = environments(RANKS.replace("two_ranks.py 3e-6", "no_file.py"))["two"]
    result = run_page(failing, tmp_path)
    assert result["snippets"] == "0 of 2" and "no_file.py" in result["problem"]


def test_an_interpreter_that_fails_and_an_install_that_fails_are_said(tmp_path):
    shim = tmp_path / "python3.99"
    shim.write_text("#!/bin/sh\necho no such version >&2\nexit 127\n")
    shim.chmod(0o755)
    steps = environments(SMALL)["one"]
    shimmed = replace(steps, install=f"{shim} -m venv .engines/one\n")
    result = run_page(shimmed, tmp_path)
    assert result["absent"] == f"no {shim} that runs" and result["problem"] == ""
    nowhere = replace(steps, install="python3.98 -m venv .engines/one\n")
    assert run_page(nowhere, tmp_path)["absent"] == "no python3.98 that runs"
    fails = replace(steps, install="python3 -c 'raise SystemExit(\"no wheel\")'\n")
    result = run_page(fails, tmp_path)
    assert (result["absent"], result["problem"]) == ("the install failed", "no wheel")
    assert not (tmp_path / ".engines" / "one" / "bin").exists()

"""Try other people's programs on stock, swapped and own models: dev/tools.md.

    python -m scripts.others.tools --markdown dev/tools.md
    python -m scripts.others.tools --features

Each tool runs in a process of its own. A claim that fails for stock too is the tool's; exits with
1 where one holds for stock and not for a swapped model of the same family, or not for ours.
--features tries those of docs/your-loop.md in the tools' loops, into that page and dev/tools.md;
cells that results/loop-features.jsonl holds are not tried again.
"""

import argparse
import json
import subprocess
import sys
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory

from scripts.others.tools.rows import Result, run
from scripts.others.tools.subjects import LOOP_FAMILIES
from scripts.others.tools.table import fails, features, is_worse, markdown
from scripts.pages.marks import section_of, with_section

ROOT = Path(__file__).resolve().parents[3]
PAGE, LOOP = ROOT / "dev" / "tools.md", ROOT / "docs" / "your-loop.md"
FEATURES, MARK = ROOT / "results" / "loop-features.jsonl", "features in loops"
ABOUT = """## Features in training loops

What [your loop](../docs/your-loop.md) shows, in one optimizer step of each tool: two micro-batches
with padding, non-reentrant activation checkpointing, bfloat16 (autocast; FSDP2 by its policy),
stock models of {}. The tool's own calls are run again without tool and feature, and compared:
experts to the bit; logits, weights and gradients to a rounding of bfloat16; losses and statistics
with their formulas in float64; biases with the loads of all micro-batches and ranks; recomputed
experts with those of the forward, under noise that moves them without pins. `make tools` fails
where a cell does.

"""


TOOLS = {
    "transformers": "with_transformers",
    "peft": "with_peft",
    "trl": "with_trl",
    "accelerate": "with_accelerate",
    "torchao, bitsandbytes": "with_quantizers",
    "lightning": "with_lightning",
    "deepspeed": "with_deepspeed",
    "lm_eval": "with_lm_eval",
}


def main() -> int:
    """Run the tools and print the tables."""
    parser = argparse.ArgumentParser(prog="scripts.others.tools", description=__doc__)
    parser.add_argument("--markdown", type=Path, help="write the tables here too")
    parser.add_argument("--tool", choices=TOOLS, help="this tool alone")
    parser.add_argument("--only", default="", help="rows whose claim contains this")
    parser.add_argument("--json", type=Path, help="results of one tool, for the process above")
    parser.add_argument("--features", action="store_true", help="features of loops, see above")
    options = parser.parse_args()
    if options.features:
        return _features(options.only)
    if options.json:
        rows = import_module(f"scripts.others.tools.{TOOLS[options.tool]}").ROWS
        results = run(rows, options.only)
        options.json.write_text(json.dumps(results), encoding="utf-8")
        return 0
    tables = {}
    for tool in [options.tool] if options.tool else TOOLS:
        print(f"{tool} ...", file=sys.stderr, flush=True)
        tables[tool] = _in_process(tool, options.only)
    versions = {
        name: version(name) for name in ("torch", *(n for t in TOOLS for n in t.split(", ")))
    }
    section = section_of(PAGE.read_text(encoding="utf-8"), MARK)
    text = markdown(tables, versions) + f"\n<!-- {MARK} -->\n{section}<!-- end of {MARK} -->\n"
    sys.stdout.write(text)
    if options.markdown:
        options.markdown.write_text(text, encoding="utf-8")
    return int(any(is_worse(results) for results in tables.values()))


def _features(only: str) -> int:
    from scripts.others.tools.features import results  # with the tools, which the rest starts apart

    found = results(FEATURES, only)
    table = features(found)
    for page, section in ((PAGE, ABOUT.format(", ".join(LOOP_FAMILIES)) + table), (LOOP, table)):
        text = with_section(page.read_text(encoding="utf-8"), MARK, section)
        page.write_text(text, encoding="utf-8")
    sys.stdout.write(table)
    return int(any(fails(result) for result in found))


def _in_process(tool: str, only: str) -> list[Result]:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "results.json"
        command = [sys.executable, "-m", "scripts.others.tools", "--tool", tool]
        command += ["--json", str(path)]
        done = subprocess.run(
            [*command, "--only", only], check=False, capture_output=True, text=True
        )
        if not path.exists():
            raise SystemExit(f"error: {tool} ended with {done.returncode}: {done.stderr[-3000:]}")
        return [Result(*values) for values in json.loads(path.read_text(encoding="utf-8"))]


if __name__ == "__main__":
    raise SystemExit(main())

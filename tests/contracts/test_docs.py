"""The Python in the documentation runs, page by page, in an empty folder."""

import re
from pathlib import Path

import pytest

from tests.processes import script

ROOT = Path(__file__).resolve().parents[2]
BLOCK = re.compile(r"(<!-- not run: .+? -->\n)?```python\n(.*?)```", re.S)

# What a page assumes is there already.
MODEL = """
import torch
from transformers import OlmoeConfig, OlmoeForCausalLM
sizes = dict(vocab_size=99, hidden_size=32, intermediate_size=16, num_hidden_layers=2)
heads = dict(num_attention_heads=2, num_experts=4, num_experts_per_tok=2, pad_token_id=1)
model = OlmoeForCausalLM(OlmoeConfig(**sizes, **heads, eos_token_id=0))
model.save_pretrained("my-olmoe")
ids = torch.randint(2, 99, (2, 8))
"""
SIGMOID = """
from l2r.routers import SigmoidConfig
from l2r.swap import swap_routers
swap_routers(model, SigmoidConfig())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
"""
PRELUDES = {
    "swap.md": MODEL,
    "upcycle.md": f"{MODEL}\nbatches, held_out = [ids, ids], [ids]\n",
    "zoo.md": MODEL + SIGMOID,
    "README.md": f"{MODEL}\nx = torch.randn(3, 2048)\n",
}
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
RUN = [p for p in PAGES if any(not skipped for skipped, _ in BLOCK.findall(p.read_text()))]


@pytest.mark.parametrize("page", RUN, ids=lambda page: page.name)
def test_snippets_run(page, tmp_path, monkeypatch):
    blocks = [code for skipped, code in BLOCK.findall(page.read_text()) if not skipped]
    monkeypatch.chdir(tmp_path)
    code = "\n".join([PRELUDES.get(page.name, ""), *blocks])
    script(tmp_path, code, HF_HUB_OFFLINE="1").succeed()


def test_links_between_pages_lead_somewhere():
    local = 0
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.name}: {target}"
                local += 1
    assert local >= 20

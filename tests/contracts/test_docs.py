"""The Python in the docs runs, page by page, in an empty folder (README: test_readme.py)."""

import re
from importlib.util import find_spec
from pathlib import Path

import pytest
from typer.main import get_command

from l2r.cli.app import build_app
from scripts.pages import commands_page
from tests.processes import command, script
from tests.tiers import few

ROOT = Path(__file__).resolve().parents[2]
BLOCK = re.compile(r"(<!-- not run: .+? -->\n)?```python\n(.*?)```", re.S)

# What a page assumes is there already.
MODEL = """
import torch
from transformers import OlmoeConfig, OlmoeForCausalLM
sizes = dict(vocab_size=99, hidden_size=32, intermediate_size=16, num_hidden_layers=2)
heads = dict(num_attention_heads=2, num_experts=4, num_experts_per_tok=2, pad_token_id=1)
model = OlmoeForCausalLM(OlmoeConfig(**sizes, **heads, eos_token_id=0))
model.save_pretrained("my-moe")
ids = torch.randint(2, 99, (2, 8))
"""
BIASED = """
from l2r import L2RConfig
from l2r.hf.swap import swap_routers
swap_routers(model, L2RConfig(selection_bias=True), selection="router")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
"""
BIASED_FAMILY = """
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM
ranks = dict(q_lora_rank=8, kv_lora_rank=8, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8)
experts = dict(n_routed_experts=4, n_group=1, topk_group=1, first_k_dense_replace=1)
shapes = dict(sizes, moe_intermediate_size=16, num_attention_heads=2, num_key_value_heads=2)
deepseek = DeepseekV3Config(**shapes, **ranks, **experts, num_experts_per_tok=2)
DeepseekV3ForCausalLM(deepseek).save_pretrained("my-biased-moe")
"""
ADAPTER = """
from l2r.hf.swap import swap_routers
from l2r.text.tokenizer import packaged_olmoe_tokenizer
from peft import LoraConfig, get_peft_model
from transformers import PreTrainedTokenizerFast
swap_routers(model)
model.save_pretrained("my-l2r")
tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(packaged_olmoe_tokenizer()))
tokenizer.save_pretrained("my-l2r")
settings = LoraConfig(target_modules=["q_proj"], modules_to_save=["gate"], task_type="CAUSAL_LM")
get_peft_model(model, settings).save_pretrained("my-adapter")
"""
SWAPPED = """
from l2r.hf.swap import swap_routers
swap_routers(model)
model.save_pretrained("my-l2r")
"""
PRELUDES = {
    "add-a-router.md": MODEL + BIASED,
    "index.md": f"{MODEL}\nbatches = [ids, ids]\n",
    "inspect.md": MODEL,
    "routes.md": MODEL,
    "serving.md": MODEL + ADAPTER,
    "swap.md": f"{MODEL}\nbatches = [ids, ids]\n",
    "upgrade.md": MODEL + SWAPPED,
    "your-loop.md": MODEL + BIASED_FAMILY,
}
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
RUN = [p for p in PAGES[1:] if any(not skipped for skipped, _ in BLOCK.findall(p.read_text()))]


SLOW = (
    "add-a-router.md",
    "index.md",
    "inspect.md",
    "serving.md",
    "swap.md",
    "vision.md",
    "your-loop.md",
)  # trainings and diagnoses


@pytest.mark.parametrize(
    "page", few(RUN, lambda page: page.name not in SLOW, "trainings"), ids=lambda page: page.name
)
def test_snippets_run(page, tmp_path, monkeypatch):
    blocks = [code for skipped, code in BLOCK.findall(page.read_text()) if not skipped]
    monkeypatch.chdir(tmp_path)
    code = "\n".join([PRELUDES.get(page.name, ""), *blocks])
    script(tmp_path, code, HF_HUB_OFFLINE="1").succeed()


def test_a_router_in_a_file_of_one_s_own_is_trained_as_the_page_says(
    tmp_path, monkeypatch, tiny_changes
):
    """Its command, for a few steps on little text, in a folder with the page's first block.

    The file has a name of its own: a clone may hold a ``my_router.py``, which comes first.
    """
    page = (ROOT / "docs" / "add-a-router.md").read_text()
    monkeypatch.chdir(tmp_path)
    (name, words), *_ = re.findall(r"^L2R_IMPORT=(\w+) l2r (train .+)$", page, re.M)
    assert f"`{name}.py`" in page
    (tmp_path / f"{name}_of_the_page.py").write_text(BLOCK.findall(page)[0][1])
    words = [*words.split(), *tiny_changes, "--out", "run"]
    command(tmp_path / "out", *words, L2R_IMPORT=f"{name}_of_the_page").succeed()
    recipe = (tmp_path / "run" / "recipe.yaml").read_text()
    assert "kind: bilinear" in recipe and "rank: 4" in recipe


def test_the_page_of_commands_says_what_they_say_of_themselves():
    assert (ROOT / "docs" / "commands.md").read_text() == commands_page.page(), (
        "run python scripts/pages/commands_page.py"
    )
    commands = dict(commands_page.commands(get_command(build_app()), ("l2r",)))
    named = {tuple(call.split()[1:]) for call in commands}
    named.add(("evidence",))  # a plan alone means l2r evidence run
    for page in PAGES:
        for words in re.findall(r"^ *l2r ([a-z][a-z ]*)", page.read_text(), re.M):
            given = tuple(words.split())
            assert any(given[: len(call)] == call for call in named), f"{page.name}: l2r {words}"


def test_every_option_stands_in_its_command_s_section_with_the_default_it_has_there():
    page = (ROOT / "docs" / "commands.md").read_text()
    sections = dict(part.split("\n", 1) for part in page.split("\n## ")[1:])
    for call, called in commands_page.commands(get_command(build_app()), ("l2r",)):
        for one in commands_page.shown(called):
            default, name = commands_page.default_of(one), commands_page.name_of(one)
            here = f"`{name}`{default}" in sections[call]
            shared = f"- `{name}`{default}: {commands_page.text_of(one)}\n" in sections["Shared"]
            assert here or (shared and f"`{name}`" in sections[call]), f"{call} {name}"
    assert "`--length` (`128`)" in sections["l2r check"]


def test_every_page_has_a_place_in_the_menu():
    menu = re.findall(r"- ([\w-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.M)
    assert sorted(menu) == sorted(path.name for path in (ROOT / "docs").glob("*.md"))


UPGRADE = (ROOT / "docs" / "upgrade.md").read_text()
FORMER = re.findall(
    r"^\| `l2r ([^`]+)` \| `(?:l2r )?([^`]+)` \|$", UPGRADE.partition("## Modules")[0], re.M
)


@pytest.mark.parametrize(("former", "now"), FORMER)
def test_a_former_command_names_the_one_of_the_page(l2r, former, now, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("PATH").mkdir()
    Path("FILE").write_text("words")
    line = l2r(*former.split()).refusal()
    added = [word for word in now.split() if word not in former.split()]
    assert any(word in line for word in added if not word[0].isdigit()), line


def test_modules_of_the_page_of_upgrades_are_where_it_says():
    section = UPGRADE.split("## Modules")[1].split("\nNames that")[0]
    rows = [line.strip("| ").split(" | ") for line in section.splitlines() if "`" in line[:4]]
    assert len(rows) > 8
    for _, earlier, now in rows:
        there = re.findall(r"`(l2r[\w.]*)`", earlier if now == "as in 0.3" else now)
        gone = [] if now == "as in 0.3" else re.findall(r"`(l2r[\w.]*)`", earlier)
        for name in there:
            assert find_spec(name), name
        for name in gone:
            with pytest.raises(ModuleNotFoundError):
                __import__(name)


def anchors(page):
    """Names of the headings of a page, as the site and GitHub make them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)
    for title in re.findall(r"^#+ (.+)$", text, re.M):
        yield re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", title.lower()).strip())


def test_links_between_pages_lead_somewhere():
    local = 0
    for page in PAGES:
        for target, anchor in re.findall(r"\]\(([^)#]*)(?:#([^)]*))?\)", page.read_text()):
            if "://" not in target:
                other = page.parent / target if target else page
                assert other.exists(), f"{page.name}: {target}"
                assert not anchor or anchor in anchors(other), f"{page.name}: {target}#{anchor}"
                local += 1
    assert local >= 20

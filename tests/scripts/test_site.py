"""``make site``: examples of every page are made, and the first page links to them."""

import re
from pathlib import Path
from types import SimpleNamespace

from mkdocs.config.base import load_config

from scripts.pages import site_examples, site_files


def page(name):
    return SimpleNamespace(file=SimpleNamespace(src_uri=name))


def fake(commands):
    """Write the pages that the commands would write."""

    def l2r(*arguments):
        command, out = arguments[0], Path(arguments[arguments.index("--out") + 1])
        commands.append(command)
        names = {
            "compare": ("report.html", "report-text.html"),
            "diagnose": ("index.html", "index-text.html"),
            "evidence": ("decision/report.html",),
        }
        for path in [out / name for name in names.get(command, ())] or [out]:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(command)

    return l2r


def test_every_link_of_the_examples_is_a_file_that_is_made(tmp_path, monkeypatch):
    commands = []
    monkeypatch.setattr(site_examples, "l2r", fake(commands))
    monkeypatch.setattr(site_files, "EXAMPLES", tmp_path / "pages")
    assert site_files.on_page_markdown("# Home\n", page("index.md")) == "# Home\n"
    site_examples.make(tmp_path, tmp_path / "pages", "training.steps=2")
    assert commands == ["compare", "diagnose", "landscape", "evidence"]
    config = load_config(str(site_examples.ROOT / "mkdocs.yml"))
    config.plugins._current_plugin = "site_files"  # as mkdocs does around a hook
    uris = {file.src_uri for file in site_files.on_files([], config)}
    home = site_files.on_page_markdown("# Home\n", page("index.md"))
    links = re.findall(r"\]\(([^)]+)\)", home)
    assert len(links) == 5 and set(links) <= uris
    notebooks = {
        f"notebooks/{path.name}" for path in (site_examples.ROOT / "notebooks").glob("*.ipynb")
    }
    assert {uri for uri in uris if uri.endswith(".ipynb")} == notebooks != set()
    assert len(uris - notebooks) == 6
    assert site_files.on_page_markdown("# Swap\n", page("swap.md")) == "# Swap\n"


def test_results_are_no_pages_of_the_site_and_are_named_by_their_path():
    text = "[Each\nclaim](../results/evidence/README.md#claims-of-the-paper), [swap](swap.md#x)."
    shown = site_files.on_page_markdown(text, page("engines.md"))
    assert shown == "Each\nclaim (`results/evidence/README.md`), [swap](swap.md#x)."

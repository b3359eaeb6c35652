"""The page of ``l2r check`` says what came out, and folds what needs no mending."""

from dataclasses import replace

from l2r.report.check import verdict, write_check
from tests.report.findings import FINDINGS


def test_the_sentence_counts_faults_warnings_and_skipped_checks():
    says = "mine has 1 fault and 1 warning in 4 checks, 1 of them skipped."
    assert verdict("mine", FINDINGS) == says
    assert verdict("mine", FINDINGS[:1]) == "mine has 0 faults and 0 warnings in 1 checks."


def test_every_check_has_a_mark_and_what_is_wrong_stands_first(tmp_path):
    page = write_check(tmp_path / "page.html", "a<b", FINDINGS).read_text()
    assert "<p class='verdict'>a&lt;b has 1 fault and 1 warning" in page
    marks = ["✗", "!", "✓", "-"]
    places = [page.index(f">\u00a0{mark}\u00a0") for mark in marks]
    assert places == sorted(places)
    wrong = ["What this cannot say", "padding in the loss: fault</h2>", "loads: warning</h2>"]
    places = [page.index(part) for part in (*wrong, "<details>", "all is finite</td>")]
    assert places == sorted(places)
    assert "reaches &lt;b&gt;1 expert&lt;/b&gt;. Remedy: read more." in page
    assert page.count("<details>") == 2


def test_a_healthy_model_has_nothing_to_mend(tmp_path):
    fine = [replace(FINDINGS[0], check=name) for name in ("finite", "dtype")]
    page = write_check(tmp_path / "page.html", "mine", fine).read_text()
    assert "Remedy" not in page and page.count("<details>") == 1

"""Verdicts from made-up seeds, and the command on tiny runs."""

import json
import re
import shlex

import pytest

from l2r.cli import main
from l2r.diagnostics.claims import CLAIMS, VARIANTS, Claim, judge

LARGER = Claim("here", "a has more", "f", "a", "b", True)
SMALLER = Claim("here", "a has less", "f", "a", "b", False)


def seeds(*values):
    return [{"f": float(value)} for value in values]


@pytest.mark.parametrize(
    ("first", "second", "larger", "smaller"),
    [
        ((3, 4, 5), (1, 2, 3), "holds", "does not hold"),
        ((1, 2, 3), (3, 4, 5), "does not hold", "holds"),
        ((1, 5, 2), (2, 1, 4), "undecided here", "undecided here"),
        ((1, 2, 3), (1, 2, 3), "undecided here", "undecided here"),
    ],
)
def test_verdicts(first, second, larger, smaller):
    numbers = {"a": seeds(*first), "b": seeds(*second)}
    assert judge(LARGER, numbers).verdict == larger
    assert judge(SMALLER, numbers).verdict == smaller


def test_pairing_by_seed_sees_what_the_spread_of_seeds_hides():
    numbers = {"a": seeds(1.1, 5.1, 9.1), "b": seeds(1, 5, 9)}
    finding = judge(LARGER, numbers)
    assert finding.verdict == "holds" and finding.difference.mean == pytest.approx(0.1)


def test_one_seed_or_unequal_seeds_are_refused():
    for first, second in ((seeds(1), seeds(2)), (seeds(1, 2, 3), seeds(1, 2))):
        with pytest.raises(ValueError, match="same seeds on both sides, at least 2"):
            judge(LARGER, {"a": first, "b": second})


def test_claims_name_variants_that_exist():
    assert {c.first for c in CLAIMS} | {c.second for c in CLAIMS} == set(VARIANTS)


@pytest.mark.parametrize(
    ("where", "fixed", "varied"),
    [("Figure 5a", {"heads": 4}, ("rank", 2, 32)), ("Figure 5b", {"rank": 2}, ("heads", 16, 1))],
)
def test_ablation_claims_vary_one_size_and_fix_the_other_as_their_figure(where, fixed, varied):
    (claim,) = (c for c in CLAIMS if c.where == where)
    field, better, worse = varied
    assert VARIANTS[claim.first] == {"kind": "l2r_sips", field: better, **fixed}
    assert VARIANTS[claim.second] == {"kind": "l2r_sips", field: worse, **fixed}


def evidence(capsys, *args):
    with pytest.raises(SystemExit) as done:
        main(["evidence", *map(str, args)])
    captured = capsys.readouterr()
    return done.value.code, captured.out, captured.err


def test_the_command_judges_every_claim_and_its_page_says_how_to_repeat_it(
    tiny_changes, tmp_path, capsys, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    changes = [c for c in tiny_changes if not c.startswith(("training.steps", "checkpoint"))]
    args = [*changes, "training.steps=2", "model.hidden_size=64", "--seeds", 2, "--quick"]
    args += ["--recipe", "demo/linear", "--out", "my runs", "--write", "page.md"]
    code, out, _ = evidence(capsys, *args, "--json")
    assert code == 0
    rows = json.loads(out)
    assert len(rows) == len(CLAIMS)
    assert {row["verdict"] for row in rows} <= {"holds", "does not hold", "undecided here"}
    page = (tmp_path / "page.md").read_text()
    assert page.count("\n| ") >= len(CLAIMS)
    assert "2 steps of 256 tokens" in page and changes[0].removeprefix("data.corpus=") in page
    assert "19,531,250 times fewer" in page  # the paper's 10^10 over 2 x 256
    runs = {path: path.stat().st_mtime_ns for path in (tmp_path / "my runs").iterdir()}
    assert len(runs) == 2 * len(VARIANTS)

    (tmp_path / "page.md").unlink()
    (command,) = re.findall(r"^    l2r evidence (.*)$", page, flags=re.M)
    assert evidence(capsys, *shlex.split(command))[0] == 0
    assert (tmp_path / "page.md").read_text() == page
    assert runs == {p: p.stat().st_mtime_ns for p in (tmp_path / "my runs").iterdir()}
    assert {p.name for p in tmp_path.iterdir()} == {"my runs", "page.md"}


def test_the_command_refuses_what_has_no_next_token(tmp_path, capsys):
    code, _, err = evidence(capsys, "--recipe", "demo-vision/linear", "--out", tmp_path / "runs")
    assert code == 2 and "recipe must be a language recipe; got demo-vision/linear" in err
    assert not (tmp_path / "runs").exists()

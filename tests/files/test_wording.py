"""Names in the other spelling, and folders found by it."""

import pytest

from l2r.files.wording import existing_path, known_as


@pytest.mark.parametrize(
    ("name", "known", "expected"),
    [
        ("l2r-sips", ["l2r_sips", "linear"], "l2r_sips"),
        ("demo/l2r_sips", ["demo/l2r-sips"], "demo/l2r-sips"),
        ("l2r_sips", ["l2r_sips", "l2r-sips"], "l2r_sips"),  # both are there: the one that was said
        ("a_b-c", ["a_b_c", "a-b-c"], "a_b-c"),  # two fit: nothing is guessed
        ("l2r_sip", ["l2r_sips"], "l2r_sip"),
    ],
)
def test_one_spelling_is_the_other(name, known, expected):
    assert known_as(name, known) == expected


def test_a_missing_path_is_the_one_beside_it_that_spells_the_same(tmp_path, monkeypatch):
    (tmp_path / "my_runs" / "l2r_sips").mkdir(parents=True)
    asked = tmp_path / "my-runs" / "l2r-sips"
    assert existing_path(asked) == tmp_path / "my_runs" / "l2r_sips"
    assert existing_path(asked / "model") == asked / "model"
    assert existing_path(tmp_path / "my_runs" / "xmoe") == tmp_path / "my_runs" / "xmoe"
    monkeypatch.chdir(tmp_path)
    assert existing_path("my-runs/l2r-sips").is_dir()
    assert str(existing_path("allenai/OLMoE-1B-7B-0924")) == "allenai/OLMoE-1B-7B-0924"

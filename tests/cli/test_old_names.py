"""Commands as 0.1.0 documented them still do what they did."""

import pytest

from l2r.cli.old_names import with_new_names

README_OF_0_1_0 = {
    "swap my-olmoe --router l2r_sips --rank 2 --heads 16 --out my-l2r": (
        "swap my-olmoe --out my-l2r router.kind=l2r_sips router.rank=2 router.heads=16"
    ),
    "swap --rank=8 --option beta=0.5 my-olmoe --out new": (
        "swap my-olmoe --out new router.rank=8 router.beta=0.5"
    ),
    "swap --families --only gpt_oss --write families.md": (
        "families --only gpt_oss --write families.md"
    ),
    "upcycle my-olmoe --rank 2 --text my-text/ --sequence-length=64 --train-steps 200": (
        "upcycle my-olmoe --data my-text/ --length=64 --train-steps 200 router.rank=2"
    ),
    "data prepare tokens --source my-shards": "data prepare tokens --data my-shards",
    "eval runs/linear --max-length 128": "eval runs/linear --length 128",
    "compare demo training.steps=100 --routers linear": (
        "compare demo training.steps=100 --routers linear"
    ),
    "": "",
    "--version": "--version",
}


@pytest.mark.parametrize(("old", "new"), README_OF_0_1_0.items())
def test_old_options_become_new_ones(old, new):
    assert with_new_names(old.split()) == new.split()


def test_an_old_option_without_its_value_is_refused(l2r, tmp_path):
    code, _, err = l2r("swap", "my-olmoe", "--out", tmp_path / "new", "--rank")
    assert code == 2 and "No such option: --rank" in err

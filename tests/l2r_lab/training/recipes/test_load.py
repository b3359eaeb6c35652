"""Reading recipes: bases, changes, another router, and the three ways to give a length."""

import pytest

from l2r.routers import make_config, router_names
from l2r_lab.studies.cells import grid_cells, read_grid
from l2r_lab.training.recipes.load import dump_recipe, load_recipe

BASE = """
task: language
router: {kind: l2r_sips, rank: 8, heads: 4, gamma: 2.0, temperature: 0.5}
training: {steps: 20, global_batch: 8}
"""


@pytest.fixture
def base(tmp_path):
    path = tmp_path / "base.yaml"
    path.write_text(BASE)
    return path


def over(base, text):
    """A recipe file over ``base``, and its name."""
    path = base.with_name("above.yaml")
    path.write_text(f"base: {base}\n{text}")
    return str(path)


def by_base(base, kind):
    return load_recipe(over(base, f"router: {{kind: {kind}}}\n"))


def by_command_line(base, kind):
    return load_recipe(str(base), [f"router.kind={kind}"])


def by_sweep(base, kind):
    (cell,) = grid_cells(str(base), [], read_grid([f"router.kind={kind}"]), 1)
    return cell.recipe


@pytest.mark.parametrize("change", [by_base, by_command_line, by_sweep])
@pytest.mark.parametrize(
    ("kind", "kept"),
    [
        ("linear", {"temperature": 0.5}),
        ("l2r_dot", {"rank": 8, "heads": 4, "temperature": 0.5}),
        ("xmoe", {"rank": 8, "temperature": 0.5}),
        ("l2r_sips", {"rank": 8, "heads": 4, "gamma": 2.0, "temperature": 0.5}),
    ],
)
def test_another_router_keeps_the_options_that_both_read(base, change, kind, kept):
    assert change(base, kind).router == make_config(kind, **kept)


@pytest.mark.parametrize("kind", router_names())
def test_a_recipe_written_out_in_full_changes_its_router_as_the_short_one_does(base, kind):
    """Defaults differ between routers: init_std is 0.02 of linear and None of L2R."""
    full = base.with_name("full.yaml")
    full.write_text(dump_recipe(load_recipe(str(base))))
    assert "init_std: null" in full.read_text()
    assert by_command_line(full, kind) == by_command_line(base, kind)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("router.rnk=2", r"router: 'l2r_sips' has no option 'rnk' \(did you mean 'rank'\?\)"),
        ("router.rank=0", r"router: rank must be >= 1; got rank=0"),
        ("router.kind=l2r_sip", r"unknown router 'l2r_sip' \(did you mean 'l2r_sips'\?\)"),
        ("router.scoring=dot", r"router: 'l2r_sips' fixes scoring='sips'; got 'dot'"),
        ("router=3", r"router: must be a section such as {kind: l2r_sips}; got 3"),
        ("router=null", r"router: must be a section such as {kind: l2r_sips}; got None"),
        ("router.query_norm=none", None),
    ],
)
def test_the_router_section_is_checked_as_every_other(base, change, message):
    if message is None:
        assert load_recipe(str(base), [change]).router.query_norm == "none"
        return
    with pytest.raises(ValueError, match=message):
        load_recipe(str(base), [change])


def test_a_vision_recipe_has_the_papers_vision_settings_where_it_gives_none():
    change = "router={kind: l2r_sips}"
    assert load_recipe("demo-vision/linear", [change]).router.query_norm == "batchnorm"
    assert load_recipe("demo/linear", [change]).router.query_norm == "rmsnorm"
    given = load_recipe("demo-vision/linear", ["router={kind: l2r_sips, query_norm: rmsnorm}"])
    assert (given.router.query_norm, given.router.heads) == ("rmsnorm", 4)


@pytest.mark.parametrize("order", [1, -1])
def test_an_option_given_beside_a_router_that_lacks_it_is_refused(base, order):
    changes = ["router.rank=2", "router.kind=linear"][::order]
    with pytest.raises(ValueError, match="'linear' has no option 'rank'"):
        load_recipe(str(base), changes)
    changes = ["router.anchor_scale=0.5", "router.kind=xmoe"][::order]
    assert load_recipe(str(base), changes).router.anchor_scale == 0.5


def test_a_misspelt_option_of_the_base_is_not_lost_with_its_router(base):
    base.write_text(BASE.replace("rank:", "rnk:"))
    with pytest.raises(ValueError, match="no option 'rnk'"):
        load_recipe(str(base), ["router.kind=l2r_dot"])


@pytest.mark.parametrize(
    ("given", "left"),
    [
        (["training.epochs=1"], "epochs"),
        (["training.tokens=4096"], "tokens"),
        (["training.tokens=4096", "training.steps=5"], "steps"),
    ],
)
def test_the_length_given_last_replaces_the_others(base, given, left):
    training = load_recipe(str(base), given).training
    lengths = {name: getattr(training, name) for name in ("steps", "tokens", "epochs")}
    assert [name for name, value in lengths.items() if value is not None] == [left]


def test_a_recipes_length_replaces_its_bases(base):
    training = load_recipe(over(base, "training: {epochs: 2}\n")).training
    assert training.steps is None and training.epochs == 2 and training.global_batch == 8
    (cell,) = grid_cells(str(base), [], read_grid(["training.epochs=3"]), 1)
    assert cell.recipe.training.steps is None and cell.recipe.training.epochs == 3


def test_two_lengths_in_one_place_are_refused(base):
    with pytest.raises(ValueError, match="exactly one of steps, tokens, epochs"):
        load_recipe(over(base, "training: {epochs: 2, steps: 3}\n"))
    with pytest.raises(ValueError, match=r"training.steps and training.epochs"):
        read_grid(["training.steps=5,6", "training.epochs=1,2"])

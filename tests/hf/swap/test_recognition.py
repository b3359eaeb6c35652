"""Families that are in no table are recognized by what their routers return."""

import dataclasses
import inspect

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, MixtralConfig, MixtralForCausalLM

import l2r as library
from l2r import record, replay, swap_routers
from l2r.hf.swap import families, recognition, sites
from l2r.hf.swap.families import FAMILIES
from l2r.hf.swap.rules import Unmatched
from l2r.hf.swap.sites import find_sites, router_sites, running_sites
from l2r.routers import L2RConfig, Router
from l2r.routers.observe import find_routers, watched
from tests.checkpoints import small_tokenizer
from tests.hf.families import BY_RULE, tiny_model
from tests.hf.family_sizes import TINY
from tests.hf.swap.made_up import TYPES, write_folder
from tests.tiers import few

__all__ = ["small_tokenizer"]

# One of each way to be called: by hidden states alone; with the block's bias, which must be given
# or may be; by [B, S, D] only, with the matrix inside.
CONTRACTS = ("olmoe", "deepseek_v3", "minimax_m2", "lfm2_moe", "afmoe")
CONFIG = L2RConfig(rank=2, heads=4)


@pytest.fixture
def taken_out(monkeypatch):
    """``taken_out(name)``: the table without a family; what was recognized before is forgotten."""
    tables = families.FAMILIES, families.FAMILY_OF_ROUTER
    before = [dict(table) for table in tables]

    def take(name, *, rule=False):
        for table in tables:
            for key in [key for key, family in table.items() if family.model_type == name]:
                del table[key]
        if rule:
            gone = next(f.rule for f in families.TABLE if f.model_type == name)
            left = tuple(f for f in families.TABLE if f.rule is not gone)
            monkeypatch.setattr(recognition, "TABLE", left)

    yield take
    families.RECOGNIZED.clear()
    for table, entries in zip(tables, before, strict=True):  # in their order
        table.clear()
        table.update(entries)


@pytest.mark.parametrize("name", few(FAMILIES, CONTRACTS, "every family"))
def test_a_family_taken_out_of_the_table_is_recognized_by_its_own_rule(name, taken_out):
    model = tiny_model(FAMILIES[name])
    before = {site.path: site for site in router_sites(model)}
    selections = {path: site.selection for path, site in before.items()}
    sizes = {path: site.sizes for path, site in before.items()}
    taken_out(name)
    after = {site.path: site for site in router_sites(model)}
    assert list(after) == list(before)
    for path, site in after.items():
        assert dataclasses.replace(site.selection, family=None) == dataclasses.replace(
            selections[path], family=None
        )
        assert site.sizes == sizes[path]
        assert site.family.note.startswith("not in our table; behaves as ")
        assert site.family.note.endswith(" on 4,096 tokens")


@pytest.mark.parametrize("name", few(BY_RULE, CONTRACTS, "every rule"))
def test_without_its_rule_a_family_is_refused_and_not_given_another(name, taken_out):
    model = tiny_model(FAMILIES[name])
    paths = [site.path for site in router_sites(model)]
    taken_out(name, rule=True)
    found = [site for site in find_sites(model) if site.path in paths]
    assert [site.path for site in found] == paths
    for site in found:
        assert isinstance(site.selection, Unmatched)
        assert "not in our table; observed only: " in site.selection.reason
    with pytest.raises(ValueError, match=r"cannot swap the routers of .*observed only: "):
        swap_routers(model, CONFIG)


class Unfamiliar(nn.Module):
    """A sigmoid router in two groups, with one expression of its forward changed."""

    def __init__(self, change):
        super().__init__()
        self.change = (change,)  # no setting
        self.top_k, self.num_group, self.topk_group = 2, 2, 1
        self.routed_scaling_factor, self.norm_topk_prob = 1.0, True
        self.weight = nn.Parameter(torch.randn(8, 32))
        self.register_buffer("e_score_correction_bias", torch.zeros(8))

    def forward(self, x):
        (change,) = self.change
        logits = x.reshape(-1, 32) @ self.weight.T
        scores = logits.sigmoid()
        biased = scores + self.e_score_correction_bias
        grouped = biased.view(len(x), self.num_group, -1)
        count = 1 if change == "groups by their best" else 2
        best = grouped.topk(count, dim=-1).values.sum(dim=-1).topk(self.topk_group).indices
        mask = torch.zeros(grouped.shape[:2], dtype=torch.bool).scatter(1, best, True)
        ranked = grouped.masked_fill(~mask.unsqueeze(-1), float("-inf")).flatten(1)
        indices = ranked.topk(self.top_k).indices
        weights = (biased if change == "biased weights" else scores).gather(1, indices)
        if self.norm_topk_prob:
            weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
        if change == "another scale in training" and self.training:
            weights = weights * 2
        return logits, weights * self.routed_scaling_factor, indices


def unfamiliar(change):
    config = MixtralConfig(**TINY, num_local_experts=8)
    model = MixtralForCausalLM(config).eval()
    model.config.model_type = "unfamiliar"
    for layer in model.model.layers:
        layer.mlp.gate = Unfamiliar(change).eval()
    return model


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("biased weights", "with a selection bias weights differ from deepseek_v3's by up to"),
        ("groups by their best", r"experts differ from deepseek_v3's in \d+\.\d% of tokens"),
        ("another scale in training", "with training weights are 2 times those of deepseek_v3"),
    ],
)
def test_a_difference_that_defaults_hide_is_found_and_named(change, words):
    model = unfamiliar(change)
    ids = torch.arange(3, 27).view(2, 12)
    x = torch.randn(16, 32)
    _, weights, indices = model.model.layers[0].mlp.gate(x)
    stock = FAMILIES["deepseek_v3"].selection(model.model.layers[0].mlp.gate)
    logits = model.model.layers[0].mlp.gate(x)[0]
    same = stock.weigh(model.model.layers[0].mlp.gate, logits, indices)
    torch.testing.assert_close(same, weights)  # as they stand the weights are the same
    with pytest.raises(ValueError, match=f"'unfamiliar': not in our table; .*{words}"):
        swap_routers(model, CONFIG)
    with record(model) as recorder:
        model(ids)
    with (
        pytest.raises(ValueError, match="cannot replay Unfamiliar"),
        replay(model, recorder.routes()),
    ):
        model(ids)


def test_the_same_router_unchanged_is_recognized_in_some_layers_and_swapped_in_others():
    model = unfamiliar("nothing")
    swap_routers(model, CONFIG, layers=[1])
    kinds = [(site.layer, type(site.router).__name__) for site in running_sites(model)]
    assert kinds == [(0, "Unfamiliar"), (1, "L2RRouter")]
    assert "behaves as deepseek_v3" in sites.recognition_note(model)


def test_families_of_the_table_are_not_looked_at(monkeypatch):
    monkeypatch.setattr(sites, "recognize", lambda *_: pytest.fail("looked at"))
    assert router_sites(tiny_model(FAMILIES["mixtral"]))


def test_recognition_draws_from_no_stream_of_the_user():
    model = unfamiliar("nothing")
    state = torch.get_rng_state()
    assert router_sites(model)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.fixture(scope="module")
def folders(tmp_path_factory, small_tokenizer):
    """The folders of the two families by name."""
    root = tmp_path_factory.mktemp("made-up")
    return {name: write_folder(root / name, name, small_tokenizer) for name in TYPES}


def opened(folder):
    return library.load_pretrained(folder, trust_remote_code=True)


PLUM = "not in our table; behaves as deepseek_v3 on 4,096 tokens"
QUINCE = (
    "not in our table; observed only: with routed_scaling_factor=2.5 weights are 0.4 times those "
    "of deepseek_v3: a scale before normalizing"
)


@pytest.mark.usefixtures("coarse", "unchecked")
@pytest.mark.parametrize(("name", "note"), [("plum", PLUM), ("quince", QUINCE)])
def test_check_and_diagnose_see_the_routers_and_say_what_they_are(
    name, note, l2r, folders, text_folder, tmp_path
):
    text = ("--trust-remote-code", "--data", text_folder)  # the embedded corpus takes half a minute
    checked = l2r("check", folders[name], *text)
    assert f"routers of {name}: {note}" in checked.err
    (line,) = [line for line in checked.out.splitlines() if " selection: " in line]
    assert note in line and line.split()[0] == ("ok" if name == "plum" else "skipped")
    assert "fault" not in [line.split()[0] for line in checked.out.splitlines()[1:]]
    options = ("--instances", "1", "--length", "16", "--certify", "0", "--out", tmp_path / "page")
    diagnosed = l2r("diagnose", folders[name], *text, *options)
    assert diagnosed.code == 0 and f"routers of {name}: {note}" in diagnosed.err


def test_swap_refuses_the_one_whose_rule_differs_and_writes_nothing(l2r, folders, tmp_path):
    ended = l2r("swap", folders["quince"], "--trust-remote-code", "--out", tmp_path / "new")
    assert ended.code == 2 and not (tmp_path / "new").exists()
    assert f"cannot swap the routers of 'quince': {QUINCE}" in ended.err.splitlines()[-1]


def test_swap_of_the_one_that_has_a_rule_is_saved_and_loads_again(
    l2r, folders, tmp_path, monkeypatch
):
    new, ids = tmp_path / "new", torch.arange(3, 27).view(2, 12)
    ended = l2r("swap", folders["plum"], "--trust-remote-code", "rank=4", "--out", new)
    assert ended.code == 0 and f"routers of plum: {PLUM}" in ended.err
    assert f"load it with l2r.load_pretrained({str(new)!r}, trust_remote_code=True)" in ended.out
    model = opened(new)
    old = opened(folders["plum"])
    for site, other in zip(router_sites(model), router_sites(old), strict=True):
        assert isinstance(site.router, Router) and site.selection == other.selection
        assert torch.equal(
            site.router.e_score_correction_bias, other.router.e_score_correction_bias
        )
    model.save_pretrained(tmp_path / "again")
    assert torch.equal(opened(tmp_path / "again")(ids).logits, model(ids).logits)
    monkeypatch.setattr("builtins.input", lambda *_: "n")
    for trusted in (True, False):  # it would draw the routers at random
        with pytest.raises(Exception, match="l2r-moe"):
            AutoModelForCausalLM.from_pretrained(new, trust_remote_code=trusted)
    with pytest.raises(ValueError, match="--trust-remote-code"):
        library.load_pretrained(new)


def test_routes_of_a_recognized_router_are_recorded_and_replayed_to_the_bit(folders):
    model, ids = opened(folders["plum"]), torch.arange(3, 27).view(2, 12)
    with torch.no_grad():
        chosen, moved = {}, {}
        seen = watched(find_routers(model), lambda x, output, name: chosen.update({name: output}))
        with record(model) as recorder, seen:
            expected = model(ids).logits
        for layer, output in enumerate(chosen.values()):
            assert (recorder.routes().experts[:, layer] == output.indices.numpy()).all()
        for site in router_sites(model):
            site.router.weight += 0.1 * torch.randn_like(site.router.weight)
        seen = watched(find_routers(model), lambda x, output, name: moved.update({name: output}))
        with replay(model, recorder.routes()), seen:
            model(ids)
        for name, output in moved.items():
            assert torch.equal(output.indices, chosen[name].indices)
            assert not torch.equal(output.weights, chosen[name].weights)
        with record(model) as again:
            live = model(ids).logits
        with replay(model, again.routes()):
            assert torch.equal(model(ids).logits, live)
    assert not torch.equal(live, expected)


def test_a_module_beside_experts_that_breaks_the_contract_is_no_router():
    model = unfamiliar("nothing")
    for layer in model.model.layers:
        layer.mlp.gate = nn.Linear(32, 8, bias=False)
    assert inspect.signature(model.model.layers[0].mlp.gate.forward).parameters
    with pytest.raises(ValueError, match="'unfamiliar' has no router of a supported family"):
        swap_routers(model, CONFIG)

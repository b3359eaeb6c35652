"""The score explorer: its script scores as l2r.functional does, and as a checkpoint's router."""

import html
import json
import re
from importlib.resources import files

import numpy as np
import pytest
import torch
from torch import nn

from l2r.analysis.diagnostics.landscape import anchors_of, drawn_anchors
from l2r.functional import cosine_scores, dot_scores, pool_anchors, sips_scores
from l2r.routers import RouterConfig, build_router
from l2r_lab.report.explorer import write_explorer
from tests.analysis.diagnostics.models import ours, stock
from tests.report.javascript import CHROMIUM, NODE, dom, evaluate

SCORES = (files("l2r_lab.report") / "explorer_scores.js").read_text()
needs_script = pytest.mark.skipif(not (NODE or CHROMIUM), reason="needs node or chromium")
# Every number is a handful of operations in float64 on values below 100.
NEAR = {"rtol": 1e-12, "atol": 1e-12}


def random_settings(random, scoring):
    return {
        "scoring": scoring,
        "gamma": random.uniform(0.2, 3),
        "beta": random.uniform(0, 1),
        "p": random.uniform(1, 9),
        "temperature": random.uniform(0.1, 3),
        "eps": 1e-6,
        "scale": random.uniform(0.2, 2),
        "shift": random.uniform(-1, 1),
    }


def python_logits(queries, anchors, settings):
    q, k = torch.tensor(queries, dtype=torch.float64), torch.tensor(anchors, dtype=torch.float64)
    if settings["scoring"] == "dot":
        scores = dot_scores(q, k)
    elif settings["scoring"] == "cosine":
        scores = cosine_scores(q, k, eps=settings["eps"])
    else:
        rho = settings["scale"] * torch.linalg.vector_norm(q, dim=-1) + settings["shift"]
        constants = {name: settings[name] for name in ("gamma", "beta", "p", "eps")}
        scores = sips_scores(q, k, rho_hat=rho, **constants)
    return pool_anchors(scores) / settings["temperature"]


@needs_script
def test_the_script_scores_as_the_functions_do(tmp_path):
    random = np.random.default_rng(0)
    cases = []
    for scoring in ("sips", "cosine", "dot"):
        for heads in (1, 2, 5):
            queries = random.normal(size=(20, 2)) * 3
            queries[0], queries[1] = 0, [1e-9, -2e-9]  # below eps
            anchors = random.normal(size=(6, 5, 2))
            anchors[0, 0] = 0
            settings = random_settings(random, scoring)
            cases.append([queries.tolist(), anchors.tolist(), heads, settings])
    calls = (
        f"{json.dumps(cases)}.map(one => [0, 1, 2, 3, 4, 5].map(expert => "
        "atQueries(...one, expert)))"
    )
    results = evaluate(SCORES, calls, tmp_path)
    for (queries, anchors, heads, settings), found in zip(cases, results, strict=True):
        logits = python_logits(queries, np.array(anchors)[:, :heads], settings)
        by_script = np.array([one["logit"] for one in found]).T
        np.testing.assert_allclose(by_script, logits, **NEAR)
        largest = logits.softmax(dim=-1).max(dim=-1).values
        np.testing.assert_allclose(found[0]["probability"], largest, **NEAR)
        chosen = logits.gather(1, torch.tensor(found[0]["first"])[:, None])[:, 0]
        np.testing.assert_allclose(chosen, logits.max(dim=-1).values, **NEAR)


@needs_script
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("l2r_sips", {"gamma": 1.5, "beta": 0.5, "p": 2.0, "query_norm": "batchnorm"}),
        ("l2r_sips", {"learn_temperature": True, "temperature": 0.3}),
        ("l2r_cosine", {"temperature": 0.07}),
        ("l2r_dot", {"query_norm": "none"}),
    ],
)
def test_anchors_and_settings_of_a_router_give_its_logits(tmp_path, kind, options):
    config = RouterConfig.from_dict({"kind": kind, "heads": 3, **options})
    router = build_router(config, hidden_size=8, num_experts=4, top_k=2).eval()
    with torch.no_grad():
        router.anchors.mul_(torch.rand(4, 3, 1) + 0.5)
        if router.magnitude_norm is not None:
            for name, value in (("running_mean", 1.2), ("running_var", 0.4), ("bias", 0.3)):
                getattr(router.magnitude_norm, name).fill_(value)
    x = torch.randn(9, 8)
    (one,) = anchors_of(nn.ModuleDict({"gate": router}))
    queries = router.query(x).tolist()
    arguments = json.dumps([queries, one["anchors"], 3, one["settings"]])
    for expert in range(4):
        found = evaluate(SCORES, f"atQueries(...{arguments}, {expert})", tmp_path)
        # The router's own fp32: some operations on logits of at most about 40.
        np.testing.assert_allclose(found["logit"], router(x).logits[:, expert].detach(), rtol=1e-5)


@needs_script
def test_the_plane_and_the_circle_cover_what_the_axes_say(tmp_path):
    plane, circle = evaluate(SCORES, "[planeQueries(2, 4), circleQueries(3, 360)]", tmp_path)
    assert plane[0] == [-1.5, 1.5] and plane[3] == [1.5, 1.5] and plane[-1] == [1.5, -1.5]
    np.testing.assert_allclose(circle[0], [-3, 0], atol=1e-12)
    np.testing.assert_allclose(circle[180], [3, 0], atol=1e-12)
    np.testing.assert_allclose(circle[270], [0, 3], atol=1e-12)


@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium on the PATH")
@pytest.mark.slow("a browser")
def test_the_page_shows_settings_and_the_query_of_its_first_set(tmp_path):
    """A browser starts for it, which takes a second or two."""
    sets = [drawn_anchors(3), drawn_anchors(4)]
    path = write_explorer(tmp_path / "page.html", sets, title="One & two", reach=4.0)
    document = dom(path)
    assert "<title>One &amp; two</title>" in document
    shown = dict(re.findall(r'<output for="\w+" id="(\w+)-value">([^<]*)</output>', document))
    assert (shown["beta"], shown["p"], shown["heads"], shown["experts"]) == ("1", "4", "4", "8")
    assert document.count("<option") == 2
    query = [2 * np.cos(np.pi / 4), 2 * np.sin(np.pi / 4)]
    anchors = np.array(sets[0]["anchors"])[:8, :4]
    logits = python_logits([query], anchors, sets[0]["settings"])[0]
    rows = re.findall(r"<tr><td>(\d+)</td><td>([\d.-]+)</td><td>([\d.]+)</td>", document)
    top = logits.topk(4)
    assert [int(row[0]) for row in rows] == top.indices.tolist()
    assert [row[1] for row in rows] == [f"{value:.4f}" for value in top.values.tolist()]
    shares = logits.softmax(dim=0)[top.indices]
    assert [row[2] for row in rows] == [f"{value:.4f}" for value in shares.tolist()]
    first = len(
        {
            int(e)
            for e in re.findall(
                r"\d+", re.search(r"First experts on the plane: ([\d, ]+)", document)[1]
            )
        }
    )
    said = f"{8 - first} of 8 experts have no region" if first < 7 else "first"
    assert said in re.search(r'<p id="finding"[^>]*>([^<]*)', document)[1]
    assert "<b>Try:</b>" in document and document.index("<b>Try:") < document.index("<canvas")
    assert "Logit of expert 0" in html.unescape(document)  # what a screen reader says of a canvas


def test_the_page_needs_no_network_and_data_cannot_end_its_script(tmp_path):
    one = {**drawn_anchors(0, experts=2, heads=1), "name": "</script><b>"}
    text = write_explorer(tmp_path / "page.html", [one], title="<t>", reach=1.0).read_text()
    assert text.count("</script>") == 2 and "<h1>&lt;t&gt;</h1>" in text
    assert not re.search(r"(src|href)=", text)
    assert not re.search(r"/\*[A-Z]+\*/", text)  # every mark of the template is filled


def test_more_than_eight_experts_have_colors_of_their_own(tmp_path):
    sets = [drawn_anchors(0, experts=64, heads=1)]
    text = write_explorer(tmp_path / "page.html", sets, title="t", reach=1.0).read_text()
    data = json.loads(re.search(r'application/json">(.*?)</script>', text, flags=re.S)[1])
    assert len(set(data["colors"])) == 64
    assert all(re.fullmatch("#[0-9a-f]{6}", color) for color in data["colors"])


def test_drawn_anchors_are_unit_vectors_that_follow_their_seed():
    one, same, other = drawn_anchors(1), drawn_anchors(1), drawn_anchors(2)
    assert one == same and one["anchors"] != other["anchors"]
    np.testing.assert_allclose(np.linalg.norm(one["anchors"], axis=-1), 1, rtol=1e-6)


@pytest.mark.parametrize(
    ("model", "layers", "message"),
    [
        (ours, [2], "layers must be between 0 and 1; got 2"),
        (lambda: ours(rank=4), [1], "rank=2); got L2RRouter with anchors of rank 4"),
        (lambda: ours("linear"), None, "got LinearRouter with no anchors"),
        (stock, None, "with no anchors"),
    ],
)
def test_other_layers_and_ranks_are_refused(model, layers, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        anchors_of(model(), layers)


def test_no_two_elements_of_the_page_share_an_id():
    page = (files("l2r_lab.report") / "explorer.html").read_text(encoding="utf-8")
    names = re.findall(r'\bid="([\w-]+)"', page)
    assert len(names) == len(set(names)), names

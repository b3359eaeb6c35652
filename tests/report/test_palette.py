"""Colors that everybody can tell apart: CIEDE2000 for four kinds of sight, and contrast."""

import itertools
import re

import numpy as np
import pytest

from l2r.report.palette import (
    DOMAINS,
    EXPERTS,
    ROUTER_COLORS,
    TUNED_COLORS,
    expert_colors,
    ink_on,
    layer_colors,
    router_color,
    router_of,
)

LEAST = 13.0  # CIEDE2000 between any two of sixteen; 2.3 is just noticeable side by side
TO_XYZ = np.array(
    [[0.4124564, 0.3575761, 0.1804375], [0.2126729, 0.7151522, 0.0721750],
     [0.0193339, 0.1191920, 0.9503041]]
)  # fmt: skip
# What a dichromat sees of linear sRGB (Machado, Oliveira and Fernandes 2009, severity 1).
SIGHT = {
    "normal": np.eye(3),
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216],
                   [-0.003882, -0.048116, 1.051998]],
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413],
                     [-0.011820, 0.042940, 0.968881]],
    "tritanopia": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602],
                   [0.004733, 0.691367, 0.303900]],
}  # fmt: skip


def linear(color):
    rgb = np.array([int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    return np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)


def lab(color, sight):
    seen = np.clip(np.array(SIGHT[sight]) @ linear(color), 0, 1)
    xyz = TO_XYZ @ seen / TO_XYZ.sum(axis=1)
    f = np.where(xyz > (6 / 29) ** 3, np.cbrt(xyz), xyz / (3 * (6 / 29) ** 2) + 4 / 29)
    return 116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])


def ciede2000(one, other):
    """Sharma, Wu and Dalal (2005), with all weights 1."""
    (l1, a1, b1), (l2, a2, b2) = one, other
    mean = (np.hypot(a1, b1) + np.hypot(a2, b2)) / 2
    g = 1.5 - 0.5 * np.sqrt(mean**7 / (mean**7 + 25.0**7))
    c1, c2 = np.hypot(g * a1, b1), np.hypot(g * a2, b2)
    h1, h2 = (np.degrees(np.arctan2(b, g * a)) % 360 for a, b in ((a1, b1), (a2, b2)))
    turn = (h2 - h1 + 180) % 360 - 180 if c1 * c2 else 0.0
    high, chroma = 2 * np.sqrt(c1 * c2) * np.sin(np.radians(turn / 2)), (c1 + c2) / 2
    hue = (h1 + turn / 2) % 360 if c1 * c2 else h1 + h2
    cosines = ((-0.17, 1, -30), (0.24, 2, 0), (0.32, 3, 6), (-0.20, 4, -63))
    t = 1 + sum(w * np.cos(np.radians(k * hue + shift)) for w, k, shift in cosines)
    middle = ((l1 + l2) / 2 - 50) ** 2
    sl, sc = 1 + 0.015 * middle / np.sqrt(20 + middle), 1 + 0.045 * chroma
    sh = 1 + 0.015 * chroma * t
    fade = 2 * np.sqrt(chroma**7 / (chroma**7 + 25.0**7))
    rotation = -fade * np.sin(np.radians(60 * np.exp(-(((hue - 275) / 25) ** 2))))
    light, dull, turned = (l2 - l1) / sl, (c2 - c1) / sc, high / sh
    return float(np.sqrt(light**2 + dull**2 + turned**2 + rotation * dull * turned))


def contrast(one, other):
    light = sorted(float(TO_XYZ[1] @ linear(color)) + 0.05 for color in (one, other))
    return light[1] / light[0]


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [  # of the test data of Sharma, Wu and Dalal
        ((50, 2.6772, -79.7751), (50, 0, -82.7485), 2.0425),
        ((50, -1.3802, -84.2814), (50, 0, -82.7485), 1.0),
        ((50, 2.49, -0.001), (50, -2.49, 0.0011), 7.2195),
        ((50, 2.5, 0), (73, 25, -18), 27.1492),
        ((90.8027, -2.0831, 1.4410), (91.1528, -1.6435, 0.0447), 1.4441),
    ],
)
def test_the_distance_is_that_of_the_published_pairs(one, other, expected):
    assert ciede2000(one, other) == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("sight", SIGHT)
def test_sixteen_experts_are_apart_for_every_sight(sight):
    assert len(set(EXPERTS)) == 16
    seen = [lab(color, sight) for color in EXPERTS]
    apart = {pair: ciede2000(*pair) for pair in itertools.combinations(seen, 2)}
    assert min(apart.values()) >= LEAST


def test_letters_on_a_color_have_the_contrast_that_text_needs():
    for count in (16, 64, 256):
        for color in expert_colors(count):
            assert contrast(color, ink_on(color)) >= 4.5, color


def test_lines_of_routers_stand_out_from_both_pages():
    for color in (*ROUTER_COLORS.values(), *TUNED_COLORS.values(), *DOMAINS):
        assert contrast(color, "#ffffff") >= 2.0 and contrast(color, "#14181d") >= 3.0, color
    theme = contrast("#1f2933", "#ffffff"), contrast("#e4e7eb", "#14181d")
    assert min(theme) >= 7


def test_lines_of_layers_stand_out_from_both_pages():
    for color in layer_colors(12):
        drawn = "#" + "".join(f"{int(part):02x}" for part in re.findall(r"\d+", color))
        assert contrast(drawn, "#ffffff") >= 2.0 and contrast(drawn, "#14181d") >= 2.5, color


def test_more_experts_share_a_hue_with_their_neighbors():
    colors = expert_colors(64)
    assert len(set(colors)) == 64 and expert_colors(16) == list(EXPERTS)
    seen = [lab(color, "normal") for color in colors]
    assert min(ciede2000(*pair) for pair in itertools.pairwise(seen)) >= 4.6  # twice noticeable
    assert len(set(layer_colors(12))) == 12


@pytest.mark.parametrize("sight", ["normal", "protanopia", "deuteranopia"])
def test_a_tuned_router_is_told_from_all_routers_and_from_the_other_tuned_ones(sight):
    colors = [lab(color, sight) for color in (*ROUTER_COLORS.values(), *TUNED_COLORS.values())]
    for one, other in itertools.combinations(range(len(colors)), 2):
        if other >= len(ROUTER_COLORS):
            assert ciede2000(colors[one], colors[other]) >= 8
    published, tuned = (lab(router_color(f"l2r_sips{end}"), sight) for end in ("", "_tuned"))
    assert ciede2000(published, tuned) >= 25


def test_domains_have_no_color_of_the_first_experts_or_of_another_domain():
    seen = [lab(color, "normal") for color in DOMAINS]
    assert min(ciede2000(*pair) for pair in itertools.combinations(seen, 2)) >= 6
    for expert in EXPERTS[:4]:
        assert min(ciede2000(lab(expert, "normal"), color) for color in seen) >= 10


@pytest.mark.parametrize(
    ("name", "router", "kind"),
    [
        ("l2r_sips", "l2r_sips", "published"),
        ("l2r-sips", "l2r_sips", "published"),
        ("l2r_sips.seed-1", "l2r_sips", "published"),
        ("l2r", "l2r_sips", "published"),
        ("l2r-best", "l2r_sips", "tuned"),
        ("l2r_sips_tuned", "l2r_sips", "tuned"),
        ("l2r-sips-tuned.seed-1", "l2r_sips", "tuned"),
        ("l2r-one-anchor", "l2r_sips", "other"),
        ("linear", "linear", "published"),
        ("linear_sips", "linear_sips", "published"),
        ("linear-best", "linear", "tuned"),
        ("L2R (SIPS)", "l2r_sips", "published"),
        ("Linear (SIPS)", "linear_sips", "published"),
        ("l2r_sips, rank 2", None, "other"),
        ("mine", None, "other"),
    ],
)
def test_a_router_has_one_color_by_whatever_name_and_another_when_tuned(name, router, kind):
    assert router_of(name) == router
    colors = {"published": ROUTER_COLORS, "tuned": TUNED_COLORS}
    if kind in colors:
        assert router_color(name, 3) == colors[kind][router]
    else:
        assert router_color(name, 3) not in {*ROUTER_COLORS.values(), *TUNED_COLORS.values()}
        assert router_color(name, 3) != router_color(name, 4)

"""The sentence above the table of losses on text."""

import pytest

from l2r.report.text_loss import text_table


def record(value, low, high):
    bits = {"value": value, "error": 0.1, "low": low, "high": high}
    return {"bits_per_byte": bits, "nats_per_token": None, "perplexity": None}


ONE = {"old": {"a.txt": record(1.25, 1.2, 1.3)}}
TWO = ONE | {"new": {"a.txt": record(1.24, 1.19, 1.29)}}


@pytest.mark.parametrize(
    ("losses", "differences", "sentence"),
    [
        (ONE, {}, "old on a.txt: 1.250 bits per byte, 95% interval 1.200 to 1.300."),
        (
            TWO,
            {"new - old": {"a.txt": record(-0.01, -0.015, -0.005)}},
            "new - old on a.txt: -0.010 bits per byte, 95% interval -0.015 to -0.005.",
        ),
        (
            TWO,
            {"new - old": {"a.txt": record(0.02, None, None)}},
            "new - old on a.txt: +0.020 bits per byte.",  # one document
        ),
        (
            TWO,
            {"new - old": {"a": record(0.1, 0.05, 0.2), "b": record(0.1, -0.1, 0.3)}},
            "1 of 2 differences from old in bits per byte has a 95% interval without 0.",
        ),
        (
            TWO,
            {"new - old": {"a": record(0.1, 0.05, 0.2), "b": record(-0.2, -0.3, -0.1)}},
            "2 of 2 differences from old in bits per byte have a 95% interval without 0.",
        ),
    ],
)
def test_the_verdict_is_a_sentence_with_its_interval(losses, differences, sentence):
    assert text_table(losses, differences).verdict.startswith(sentence)

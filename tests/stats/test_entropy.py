"""Entropy and information of counts, against sums known by hand and scikit-learn's."""

import numpy as np
import pytest
from sklearn.metrics import mutual_info_score

from l2r.stats.entropy import entropy, information


def test_information_is_in_bits_and_entropy_is_that_of_shares():
    assert entropy(np.array([5.0, 5.0, 0.0, 5.0, 5.0])) == pytest.approx(2)
    assert information(np.eye(4) * 3) == pytest.approx(2)
    assert information(np.ones((4, 4))) == pytest.approx(0)
    counts = np.array([[3.0, 1.0], [0.0, 4.0]])
    first, second = np.repeat([0, 0, 1], [3, 1, 4]), np.repeat([0, 1, 1], [3, 1, 4])
    bits = mutual_info_score(first, second) / np.log(2)
    assert information(counts) == pytest.approx(bits)

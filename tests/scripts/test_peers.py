"""The table of dev/peers.md names what a stock model passes and ours does not."""

from scripts.others.peers.results import Outcome, markdown


def test_a_test_that_ours_skips_and_stock_passes_is_named():
    stock = Outcome(passed={"saved", "mapped", "loaded"}, failed={"odd"}, skipped={"other"})
    ours = Outcome(passed={"saved"}, failed={"odd", "loaded"}, skipped={"mapped", "other"})
    suites, siblings = {"Stock": stock, "Ours": ours}, {"Stock": None, "Ours": "Stock"}
    lines = markdown(suites, siblings, {}, "5.0").splitlines()
    assert "| Stock | 5 | 3 | 1 | 1 |  |" in lines
    assert "| Ours | 5 | 1 | 2 | 2 | loaded, mapped |" in lines


def test_a_test_that_ours_passes_and_stock_skips_is_no_fault():
    suites = {"Stock": Outcome(skipped={"mapped"}), "Ours": Outcome(passed={"mapped"})}
    assert "| Ours | 1 | 1 | 0 | 0 | none |" in markdown(
        suites, {"Stock": None, "Ours": "Stock"}, {}, "5"
    )

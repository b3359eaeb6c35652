"""scripts/others/serve_soak counts what it asks, and notices answers that are not whole."""

import json
import subprocess
import sys

import pytest

from l2r.engines.serve.options import ServeLimits
from scripts.others.serve_soak.__main__ import LARGEST_BLOCK
from scripts.others.serve_soak.asking import (
    Counts,
    half_open_connections,
    run_clients,
    text_of,
)
from tests.engines.serve.conftest import serving


@pytest.mark.slow("a server for some time")
def test_a_soak_of_a_server_that_is_well(folder):
    """The first turn of the first client is to leave, that of the sixth a bad request.

    Six clients, 20 half-open connections and ten stalled streams are fewer than 50.
    """
    counts, limits = Counts(), ServeLimits(header_timeout=0.1, max_connections=50)
    with serving(folder, continuous_batching=True, limits=limits) as client:
        run_clients(client.port, counts, seconds=0.5, clients=6, alive=lambda: True)
        closed = half_open_connections(client.port, 60)
    assert counts.good and counts.bad and counts.left and counts.half_open
    assert not counts.changed and not +counts.lost and not counts.wrong
    assert closed == 60


@pytest.mark.parametrize(
    ("stream", "body"),
    [
        (False, b'{"choices": [{"index": 0, "text": "a", "finish_reason": null}]}'),
        (True, b'data: {"choices": [{"index": 0, "text": "a", "finish_reason": "stop"}]}\n\n'),
        (True, b"data: [DONE]\n\n"),
    ],
)
def test_answers_that_are_not_whole_are_lost(stream, body):
    request = ("POST", "/v1/completions", json.dumps({"stream": stream}).encode(), {})
    with pytest.raises(ValueError, match=r"no end|broke off"):
        text_of(request, 200, body)
    with pytest.raises(ValueError, match="status 503"):
        text_of(request, 503, body)


_PROGRAM = """
import sys
from scripts.others.serve_soak.watched import kept
held, first = [], kept()
held += [[number, {KEEP}] for number in range(1000)]
second = kept()
held.clear()
third = kept()
for later in (second, third):
    print(later["blocks"] - first["blocks"], later["bytes"] - first["bytes"])
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's malloc")
@pytest.mark.parametrize(
    ("keep", "blocks", "size"),
    [("None", 1000, 0), ("bytes(600)", 1000, 600_000), ("bytes(200)", 2000, 0)],
)
def test_what_a_process_keeps_is_seen(keep, blocks, size):
    """A thousand lists that are kept are a block each at least, and what is larger is malloc's.

    Given up, they leave less than the soak allows a thousand requests.
    """
    said = subprocess.run(
        [sys.executable, "-c", _PROGRAM.replace("{KEEP}", keep)],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    assert int(said[0]) >= blocks > int(said[2])
    assert int(said[1]) >= size and int(said[3]) < 1000 * LARGEST_BLOCK

"""scripts/others/serve_soak counts what it asks, and notices answers that are not whole."""

import json

import pytest
from scripts.others.serve_soak.asking import half_open_connections, run_clients, text_of

from l2r.engines.serve.limits import ServeLimits
from tests.engines.serve.conftest import serving


@pytest.mark.slow("a server for some time")
def test_a_soak_of_a_server_that_is_well(folder):
    """The first turn of the first client is to leave, that of the sixth a bad request."""
    limits = ServeLimits(head_seconds=0.1, connections=30)
    with serving(folder, continuous_batching=True, limits=limits) as client:
        counts = run_clients(
            client.port, seconds=0.5, clients=6, alive=lambda: True, memory=lambda: 1
        )
        refused, closed = half_open_connections(client.port, 40)
    assert counts.good and counts.bad and counts.left and counts.half_open and counts.memory
    assert not counts.changed and not +counts.lost and not counts.wrong
    assert refused >= 40 - 30 and closed == 40


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

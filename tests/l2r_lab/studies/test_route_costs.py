"""What flips cost, against plain code: losses of both models, KL in float64, replayed routes."""

import pytest
import torch

from l2r.analysis import DiagnosisSubject
from l2r.analysis.routes import in_other_arithmetic
from l2r.hf.models import L2rOlmoeConfig, L2rOlmoeForCausalLM
from l2r.hf.routes import record, replay
from l2r_lab.files.study import ARITHMETICS, OF_TEXT
from l2r_lab.studies.route_costs import route_costs

ROWS, LENGTH = 6, 16


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 16, "num_hidden_layers": 2, "vocab_size": 50}
    heads = {"num_attention_heads": 2, "num_experts": 16, "num_experts_per_tok": 4}
    model = L2rOlmoeForCausalLM(L2rOlmoeConfig(**sizes, **heads, initializer_range=0.5))
    return model.eval()


@torch.no_grad()
def test_costs_are_those_of_plain_code(model):
    ids = torch.randint(0, 50, (ROWS, LENGTH), generator=torch.Generator().manual_seed(1))

    def batches(size, device):
        return ({"input_ids": part} for part in ids.split(size))

    measured = route_costs(DiagnosisSubject(model, batches, ROWS, ("text",), {}), 4)
    assert set(measured) == set(OF_TEXT)
    with record(model) as recorder:
        logits = model(input_ids=ids).logits
    routes = recorder.routes()

    def loss(of):
        return float(
            torch.nn.functional.cross_entropy(of[:, :-1].reshape(-1, 50), ids[:, 1:].flatten())
        )

    def kl(other):
        first, second = (x.double().log_softmax(-1) for x in (logits, other))
        return float((first.exp() * (first - second)).sum(-1).mean())

    for name in ARITHMETICS:
        other = in_other_arithmetic(model, name)
        with record(other) as recorder:
            own = other(input_ids=ids).logits.float()
        with replay(other, routes):
            replayed = other(input_ids=ids).logits.float()
        sets = [r.padded()[0].sort(dim=-1).values for r in (routes, recorder.routes())]
        changed = (sets[0] != sets[1]).any(-1).any(-1).double().mean()
        assert 0 < changed < 1
        expected = {
            "flipped_tokens": float(changed),
            "ce_change": loss(own) - loss(logits),
            "kl": kl(own),
            "kl_replay_share": 1 - kl(replayed) / kl(own),
        }
        found = {measure: measured[f"{name}_{measure}"] for measure in expected}
        # sums in fp32 of 90 losses near 10: a hundred roundings of 1e-6
        assert found == pytest.approx(expected, rel=1e-4, abs=1e-5), name

"""Adapters: the router that runs is replayed, be it a copy that PEFT trains."""

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model

from l2r import record, replay
from tests.hf.routes.models import drawn_for, family_model, given_experts, token_ids

# PEFT 0.x still asks transformers 5 by a deprecated name.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")


@pytest.mark.parametrize("swapped", [False, True], ids=["stock", "swapped"])
def test_a_router_with_a_trained_copy_is_replayed(swapped):
    model, ids = family_model("qwen3_moe", swapped), token_ids()
    config = LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["gate"])
    adapted = get_peft_model(model, config)
    routes = drawn_for(adapted, (12, 12))
    with replay(adapted, routes), record(adapted) as recorder, given_experts(model) as given:
        adapted(ids, use_cache=False).logits.logsumexp(-1).sum().backward()
    assert recorder.routes() == routes
    assert np.array_equal(torch.stack(given, 1).numpy(), routes.experts)
    copies = [p for name, p in adapted.named_parameters() if "modules_to_save" in name]
    assert copies
    assert any(copy.grad is not None and copy.grad.abs().max() > 0 for copy in copies)
    with adapted.disable_adapter(), replay(adapted, routes), given_experts(model) as given:
        adapted(ids, use_cache=False)
    assert np.array_equal(torch.stack(given, 1).numpy(), routes.experts)

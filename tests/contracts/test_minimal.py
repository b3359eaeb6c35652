"""The base install: torch, numpy, safetensors and jaxtyping are enough for routers and layers."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow("fresh processes")

# None in sys.modules makes an import fail as if the package were not there.
OPTIONAL = """
import sys

names = "transformers tokenizers typer pydantic yaml rich plotly datasets kornia sklearn PIL"
for name in (names + " torchmetrics olmo_eval lm_eval tensorboard psutil accelerate").split():
    sys.modules[name] = None
"""


def run(script):
    return subprocess.run(
        [sys.executable, "-c", OPTIONAL + script], capture_output=True, text=True, check=False
    )


def test_routers_losses_and_moe_layers_need_no_optional_package():
    done = run(
        """
import torch, l2r
from l2r.functional import load_balancing_loss
from l2r.moe import Experts, MoELayer
for kind in l2r.router_names():
    router = l2r.build_router(kind, hidden_size=16, num_experts=4, top_k=2)
    layer = MoELayer(router, Experts(4, 16, 8))
    with l2r.capture(layer) as captured:
        y = layer(torch.randn(5, 16))
    loss = y.sum() + load_balancing_loss(captured.logits(), captured.indices())
    loss.backward()
print("fine")
"""
    )
    assert done.returncode == 0 and done.stdout.strip() == "fine", done.stderr[-1500:]


def test_the_command_says_what_to_install():
    done = run("from l2r.cli import main; main(['params'])")
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "pip install 'l2r-moe[cli]'" in done.stderr


def test_models_say_which_package_is_missing():
    done = run("import l2r; l2r.load_pretrained('x')")
    assert done.returncode == 1 and "import of transformers halted" in done.stderr

"""Exported folders load in an environment where l2r cannot be imported."""

import subprocess
import sys
from types import ModuleType

import pytest
import torch

from l2r import L2RConfig
from l2r.checkpoints import load_pretrained
from l2r.checkpoints.export import as_l2r_olmoe, export_remote_code, modeling_source
from l2r.checkpoints.family_check import sample_tokens, tiny_model
from l2r.models import L2rOlmoeConfig, L2rOlmoeForCausalLM
from l2r.routers import make_config, router_names
from l2r.swap import swap_routers
from l2r.swap.families import FAMILIES, TINY

LOAD = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("l2r", "jaxtyping"):
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Absent())
try:
    import l2r
except ModuleNotFoundError:
    import torch
else:
    raise SystemExit("l2r must not be importable here")
from transformers import AutoModelForCausalLM
for folder in sys.argv[1:]:
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    ids = torch.load(folder + "/ids.pt", weights_only=True)
    with torch.no_grad():
        expected = torch.load(folder + "/logits.pt", weights_only=True)
        # Fused kernels stay behind: the same sums in another order.
        torch.testing.assert_close(model(ids).logits, expected, rtol=1e-5, atol=1e-6)
    output = model(ids, output_router_logits=True)
    assert len(output.router_logits) == model.config.num_hidden_layers
    out = model.generate(ids[:1], max_new_tokens=3, do_sample=False)
    assert type(model).__module__.startswith("transformers_modules")
    print("loaded", model.config._experts_implementation)
assert "jaxtyping" not in sys.modules and "l2r" not in sys.modules
"""


def load_without_l2r(models, tmp_path):
    """Load the folders, by their models, in one new process; what it printed."""
    with torch.no_grad():
        for folder, model in models.items():
            torch.save(sample_tokens(), folder / "ids.pt")
            torch.save(model(sample_tokens()).logits, folder / "logits.pt")
    command = [sys.executable, "-I", "-c", LOAD, *map(str, models)]
    environment = {"HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env=environment, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def own(kind, **options):
    sizes = {k: v for k, v in TINY.items() if k != "moe_intermediate_size"}
    config = L2rOlmoeConfig(**sizes, num_experts=8, router=make_config(kind, **options).to_dict())
    return L2rOlmoeForCausalLM(config).eval()


def test_our_olmoe_and_a_swapped_stock_one_load_without_this_package(tmp_path):
    model, swapped = own("l2r_sips", rank=2, heads=4), tiny_model(FAMILIES["olmoe"])
    swapped.config.norm_topk_prob = True
    for layer in swapped.model.layers:
        layer.mlp.gate.norm_topk_prob = True
    swap_routers(swapped, L2RConfig(rank=8, heads=4))
    swap_routers(swapped, L2RConfig(rank=2, heads=4))  # of the first nothing is left
    ours = export_remote_code(model, tmp_path / "ours")
    stock = export_remote_code(swapped, tmp_path / "stock")
    printed = load_without_l2r({ours: model, stock: swapped}, tmp_path)
    assert printed.splitlines()[0] == "loaded grouped_mm" and printed.count("loaded") == 2
    assert not hasattr(model.config, "auto_map")
    assert torch.equal(load_pretrained(ours)(sample_tokens()).logits, model(sample_tokens()).logits)


@pytest.mark.parametrize("kind", router_names())
def test_the_file_of_every_router_gives_the_same_outputs(kind, monkeypatch):
    model = own(kind)
    source = modeling_source(kind)
    assert "import l2r" not in source
    assert "from l2r" not in source
    module = ModuleType("exported")
    monkeypatch.setitem(sys.modules, "exported", module)
    exec(compile(source, "modeling_l2r_olmoe.py", "exec"), module.__dict__)
    # transformers builds a configuration without arguments to see what differs from it.
    assert module.L2rOlmoeConfig().router == make_config(kind).to_dict()
    config = module.L2rOlmoeConfig(**model.config.to_dict())
    other = module.L2rOlmoeForCausalLM(config).eval()
    other.load_state_dict(model.state_dict())
    with torch.no_grad():
        ids = sample_tokens()
        torch.testing.assert_close(other(ids).logits, model(ids).logits)


def test_other_models_and_partial_swaps_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"remote code is for OLMoE .* got MixtralForCausalLM"):
        export_remote_code(tiny_model(FAMILIES["mixtral"]), tmp_path / "m")
    partial = swap_routers(tiny_model(FAMILIES["olmoe"]), L2RConfig(), layers=[0])
    with pytest.raises(ValueError, match="remote code is for OLMoE"):
        as_l2r_olmoe(partial)


def test_a_folder_in_use_is_refused(tmp_path):
    (tmp_path / "keep.txt").write_text("x")
    with pytest.raises(ValueError, match="out must be a new or empty folder"):
        export_remote_code(own("linear"), tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["keep.txt"]


def test_the_exported_code_leaves_this_process_its_own_classes():
    from transformers import AutoConfig

    module = ModuleType("exported_modeling")
    sys.modules[module.__name__] = module  # dataclasses look their module up
    exec(modeling_source("l2r_sips"), module.__dict__)
    del sys.modules[module.__name__]
    assert type(AutoConfig.for_model("l2r_olmoe")) is L2rOlmoeConfig

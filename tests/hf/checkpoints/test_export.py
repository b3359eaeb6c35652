"""Exported folders load in an environment where l2r cannot be imported."""

import inspect
import subprocess
import sys

import jaxtyping
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, MixtralForCausalLM
from transformers.dynamic_module_utils import get_class_from_dynamic_module

from l2r import L2RConfig, XMoEConfig
from l2r.hf.checkpoints import load_pretrained
from l2r.hf.checkpoints.export import export_remote_code
from l2r.hf.models import L2rOlmoeConfig, L2rOlmoeForCausalLM, L2rViTConfig
from l2r.hf.swap import swap_routers
from l2r.hf.swap.class_registry import auto_models, config_class
from l2r.hf.swap.families import FAMILIES
from l2r.routers import make_config, router_names
from l2r.routers.config import registered
from l2r.transformers_hook import type_name
from tests.hf.families import TINY, sample_tokens, tiny_model
from tests.tiers import few_families

LOAD = """
import json
import sys
from operator import itemgetter

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
import transformers
from transformers import AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
AUTO = [transformers.AutoModelForCausalLM, transformers.AutoModelForImageTextToText,
        transformers.AutoModelForTokenClassification]
for folder in sys.argv[1:]:
    with open(folder + "/config.json") as file:
        (name,), map_ = itemgetter("architectures", "auto_map")(json.load(file))
    opens = next(a for a in AUTO if map_.get(a.__name__, "").endswith("." + name))
    model = opens.from_pretrained(folder, trust_remote_code=True)
    ids = torch.load(folder + "/ids.pt", weights_only=True)
    with torch.no_grad():
        expected = torch.load(folder + "/logits.pt", weights_only=True)
        # Fused kernels stay behind: the same sums in another order.
        logits = model(ids, use_cache=False).logits
        torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-6)
    assert model.dtype == torch.float32 and not model.training
    assert type(model).__module__.startswith("transformers_modules")
    if opens is AutoModelForCausalLM:  # Trainer asks
        assert type(model).__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
    print("loaded", type(model).__name__)
assert "jaxtyping" not in sys.modules and "l2r" not in sys.modules
out = model.generate(ids[:1], max_new_tokens=3, do_sample=False)
model.save_pretrained(sys.argv[1] + "/again")
again = AutoModelForCausalLM.from_pretrained(sys.argv[1] + "/again", trust_remote_code=True)
assert torch.equal(again(ids).logits, model(ids).logits)
half = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, dtype="bfloat16")
types = {name: value.dtype for name, value in half.named_parameters()}
routers = {name for name in types if ".gate." in name}
assert routers
for name, dtype in types.items():
    assert dtype == (torch.float32 if name in routers else torch.bfloat16), name
"""


def load_without_l2r(models, tmp_path):
    """Load the folders, by their models, in one new process; what it printed."""
    with torch.no_grad():
        for folder, model in models.items():
            torch.save(sample_tokens(), folder / "ids.pt")
            torch.save(model(sample_tokens(), use_cache=False).logits, folder / "logits.pt")
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


def swapped_families():
    """A swapped model of every family."""
    return {
        name: swap_routers(tiny_model(family), L2RConfig(rank=2, heads=4))
        for name, family in FAMILIES.items()
    }


def swapped_twice():
    """A stock OLMoE with another rule of weights; nothing is left of its first swap."""
    model = tiny_model(FAMILIES["olmoe"])
    model.config.norm_topk_prob = True
    for layer in model.model.layers:
        layer.mlp.gate.norm_topk_prob = True
    swap_routers(model, L2RConfig(rank=8, heads=4))
    return swap_routers(model, L2RConfig(rank=2, heads=4))


def layers_that_differ():
    """Models with routers of two kinds, of another family and our own."""
    mixtral = swap_routers(tiny_model(FAMILIES["mixtral"]), L2RConfig(rank=2, heads=4), layers=[0])
    swap_routers(mixtral, XMoEConfig(rank=4), layers=[1], selection="router")
    partial = swap_routers(own("l2r_sips", rank=2), XMoEConfig(rank=4), layers=[0])
    return {"two": mixtral, "own": partial}


@pytest.mark.slow("a fresh process")
def test_folders_load_without_this_package(tmp_path):
    """All in one new process: every family swapped, our OLMoE with every router, and mixtures."""
    families = swapped_families()
    homes = {kind: registered(kind).router.__module__.partition(".")[0] for kind in router_names()}
    kinds = [kind for kind, home in homes.items() if home in ("l2r", "l2r_lab")]
    assert len(kinds) >= 12  # those of other tests are left out
    ours = {kind: own(kind) for kind in kinds}
    models = {**families, **layers_that_differ(), **ours, "twice": swapped_twice()}
    folders = {export_remote_code(m, tmp_path / name): m for name, m in models.items()}
    assert all(not getattr(model.config, "auto_map", None) for model in families.values())
    printed = load_without_l2r(folders, tmp_path).splitlines()
    # Engines know our own OLMoE, and a swapped one becomes it where it can.
    assert printed[-len(ours) - 1 :] == ["loaded L2rOlmoeForCausalLM"] * (len(ours) + 1)
    assert len(printed) == len(models) and all(line.startswith("loaded L2r") for line in printed)
    for kind, model in ours.items():
        logits = load_pretrained(tmp_path / kind)(sample_tokens()).logits
        assert torch.equal(logits, model(sample_tokens()).logits)


def refused_annotations(kind):
    """Parameters of a class whose annotation isinstance refuses, as vLLM's compile decorator asks.

    It compares the first argument with the annotation of ``self``, which must have none.
    """
    own, *others = inspect.signature(kind.__init__).parameters.values()
    refused = [] if own.annotation is inspect.Parameter.empty else [own.name]
    for parameter in others:
        try:
            isinstance(None, parameter.annotation)
        except TypeError:
            refused.append(parameter.name)
    return refused


@pytest.mark.parametrize("name", few_families(FAMILIES))
def test_annotations_of_a_swapped_model_can_be_asked_by_isinstance(name):
    """A type alias, a string or ``Any`` there ends vLLM's construction of the model."""
    config = config_class(type_name(name))
    classes = [config, *(model for _, model in auto_models(config))]
    assert len(classes) > 2
    assert {kind: refused for kind in classes if (refused := refused_annotations(kind))} == {}


def test_annotations_of_our_own_models_can_be_asked_by_isinstance():
    classes = [kind for own in (L2rOlmoeConfig, L2rViTConfig) for _, kind in auto_models(own)]
    assert len(classes) == 4 and [refused_annotations(kind) for kind in classes] == [[]] * 4


def test_an_exported_class_is_made_as_vllm_makes_it(tmp_path, monkeypatch):
    """Read from the folder; its config is the one positional argument."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # refuses HF's extra keywords
    model = swap_routers(tiny_model(FAMILIES["mixtral"]), L2RConfig(rank=2, heads=4))
    folder = export_remote_code(model, tmp_path / "exported")
    config = AutoConfig.from_pretrained(folder, trust_remote_code=True)
    kind = get_class_from_dynamic_module(config.auto_map["AutoModel"], folder)
    assert kind.__module__.startswith("transformers_modules")
    assert refused_annotations(kind) == refused_annotations(type(config)) == []
    annotation = inspect.signature(kind.__init__).parameters["config"].annotation
    assert isinstance(config, annotation)


def test_the_folders_code_makes_a_classifier_around_the_same_routers(tmp_path, monkeypatch):
    """Its inside comes from AutoModel, which gets no word that the code may run."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # refuses HF's extra keywords
    model = swap_routers(tiny_model(FAMILIES["mixtral"]), L2RConfig(rank=2, heads=4))
    folder = export_remote_code(model, tmp_path / "exported")
    config = AutoConfig.from_pretrained(folder, trust_remote_code=True)
    name = config.auto_map["AutoModelForSequenceClassification"]
    classifier = get_class_from_dynamic_module(name, folder).from_pretrained(folder, num_labels=3)
    assert type(classifier.model).__module__.startswith("transformers_modules")
    pairs = zip(classifier.model.layers, model.model.layers, strict=True)
    assert all(torch.equal(a.mlp.gate.anchors, b.mlp.gate.anchors) for a, b in pairs)


class OnesOwn(MixtralForCausalLM):
    pass


def test_models_without_our_routers_and_classes_of_the_users_own_are_refused(tmp_path):
    stock = tiny_model(FAMILIES["mixtral"])
    with pytest.raises(ValueError, match=r"got MixtralForCausalLM with 0 of them"):
        export_remote_code(stock, tmp_path / "m")
    theirs = swap_routers(OnesOwn(stock.config), L2RConfig(rank=2, heads=4))
    with pytest.raises(ValueError, match=r"family of transformers or ours.* got OnesOwn with 2"):
        export_remote_code(theirs, tmp_path / "m")
    assert not (tmp_path / "m").exists()


def test_a_folder_in_use_is_refused(tmp_path):
    (tmp_path / "keep.txt").write_text("x")
    with pytest.raises(ValueError, match="out must be a new or empty folder"):
        export_remote_code(own("linear"), tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["keep.txt"]


def test_the_exported_code_leaves_this_process_its_own_classes(tmp_path, monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # refuses HF's extra keywords
    for model in (own("l2r_sips"), swap_routers(tiny_model(FAMILIES["mixtral"]), L2RConfig())):
        folder = export_remote_code(model, tmp_path / model.config.model_type)
        loaded = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
        assert type(loaded) is type(model)
        assert type(AutoConfig.for_model(model.config.model_type)) is type(model.config)

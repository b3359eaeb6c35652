"""A swapped checkpoint opens with its routers in every loader, or not at all."""

import copy
import json
import pickle
import re
import subprocess
import sys

import pytest
import tokenizers
import torch
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    OlmoeForCausalLM,
    ViTForImageClassification,
    pipeline,
)

import l2r
from l2r import L2RConfig, Router, XMoEConfig
from l2r.hf.models import (
    L2rOlmoeConfig,
    L2rOlmoeForCausalLM,
    L2rViTConfig,
    L2rViTForImageClassification,
)
from l2r.hf.swap import class_registry, swap_routers
from l2r.hf.swap.families import FAMILIES
from tests.hf.families import TINY, auto_class, sample_tokens, tiny_model
from tests.tiers import few_families

CONFIG = L2RConfig(rank=2, heads=4)


def swapped(name, **options):
    return swap_routers(tiny_model(FAMILIES[name]), CONFIG, **options)


@torch.no_grad()
def logits(model):
    return model.eval()(sample_tokens(), use_cache=False).logits


def own(**options):
    sizes = {k: v for k, v in TINY.items() if k != "moe_intermediate_size"}
    config = L2rOlmoeConfig(**sizes, num_experts=4, router={"kind": "l2r_sips", "rank": 2})
    return L2rOlmoeForCausalLM(config).eval()


@pytest.mark.parametrize("name", few_families(FAMILIES))
def test_an_auto_class_opens_the_routers_that_were_saved(name, tmp_path):
    model = swapped(name)
    model.save_pretrained(tmp_path / "swapped")
    loaded = auto_class(model.config).from_pretrained(tmp_path / "swapped")
    assert type(loaded) is type(model)
    saved = model.state_dict()
    assert {n for n in saved if not torch.equal(saved[n], loaded.state_dict()[n])} == set()
    # Loaded weights are mapped from the file; at another alignment a matrix product may round
    # otherwise, so that logits are compared where both models' weights are copies.
    with torch.no_grad():
        for parameter in (*model.parameters(), *loaded.parameters()):
            parameter.data = parameter.data.clone()
    assert torch.equal(logits(loaded), logits(model))


@pytest.mark.parametrize("name", few_families(FAMILIES))
def test_the_familys_own_class_refuses_the_folder_and_names_the_package(name, tmp_path):
    model = tiny_model(FAMILIES[name])
    stock = type(model)
    swap_routers(model, CONFIG).save_pretrained(tmp_path)
    with pytest.raises(Exception, match="l2r-moe") as error:
        stock.from_pretrained(tmp_path)
    assert "load_pretrained" in str(error.value)


def test_stock_classes_refuse_folders_of_our_own_models_too(tmp_path):
    own().save_pretrained(tmp_path / "olmoe")
    with pytest.raises(Exception, match="l2r-moe"):
        OlmoeForCausalLM.from_pretrained(tmp_path / "olmoe")
    sizes = {"hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 32}
    config = L2rViTConfig(**sizes, num_hidden_layers=2, image_size=8, patch_size=4, num_experts=4)
    L2rViTForImageClassification(config).save_pretrained(tmp_path / "vit")
    with pytest.raises(Exception, match="l2r-moe"):
        ViTForImageClassification.from_pretrained(tmp_path / "vit")
    config = L2rViTConfig.from_pretrained(tmp_path / "vit")
    assert config.initializer_range == L2rViTConfig().initializer_range


@pytest.mark.parametrize("kind", ["swapped", "in one layer", "own"])
def test_a_configuration_object_of_other_routers_is_refused(kind, tmp_path):
    """transformers does not read config.json then: stock routers would be drawn in silence."""
    stock = copy.deepcopy(tiny_model(FAMILIES["olmoe"]).config)
    model = (
        own() if kind == "own" else swapped("olmoe", layers=[1] if kind == "in one layer" else None)
    )
    model.save_pretrained(tmp_path)
    for auto in (AutoModelForCausalLM, OlmoeForCausalLM):
        with pytest.raises(ValueError, match="leave config out, or take AutoConfig"):
            auto.from_pretrained(tmp_path, config=stock)
    with pytest.raises(ValueError, match=r"config of a swapped|leave config out"):
        l2r.load_pretrained(tmp_path, config=stock)
    theirs = AutoConfig.from_pretrained(tmp_path)
    theirs.attention_dropout = 0.25
    opened = AutoModelForCausalLM.from_pretrained(tmp_path, config=theirs)
    assert opened.config.attention_dropout == 0.25
    assert torch.equal(logits(opened), logits(model))
    if kind == "in one layer":
        theirs.l2r_swap[0]["layers"], theirs.name_or_path = [0], ""
        with pytest.raises(ValueError, match="does not build"):
            AutoModelForCausalLM.from_pretrained(tmp_path, config=theirs)


@pytest.mark.parametrize(
    ("kind", "field"), [("own", "kind"), ("swapped", "kind"), ("swapped", "selection")]
)
def test_a_configuration_object_of_another_kind_of_router_is_refused(kind, field, tmp_path):
    """l2r_dot has the tensors of l2r_sips: they would load, and give other logits."""
    model = own() if kind == "own" else swapped("olmoe")
    model.save_pretrained(tmp_path)
    theirs = AutoConfig.from_pretrained(tmp_path)
    theirs.name_or_path = ""
    if field == "kind":
        (theirs.router if kind == "own" else theirs.l2r_swap[0]["router"])["kind"] = "l2r_dot"
    else:
        theirs.l2r_swap[0]["selection"] = "router"
    with pytest.raises(ValueError, match="does not build"):
        AutoModelForCausalLM.from_pretrained(tmp_path, config=theirs)


def test_a_configuration_object_for_a_stock_folder_is_taken_as_it_is(tmp_path):
    model = tiny_model(FAMILIES["olmoe"])
    model.save_pretrained(tmp_path)
    config = copy.deepcopy(model.config)
    for _ in range(2):
        opened = OlmoeForCausalLM.from_pretrained(tmp_path, config=config)
        assert torch.equal(logits(opened), logits(model))
        (tmp_path / "config.json").unlink(missing_ok=True)


@pytest.mark.parametrize("kind", ["swapped", "own"])
def test_a_configuration_is_read_from_its_file_alone(kind, tmp_path):
    """``from_json_file`` is a door of its own: it goes past ``from_dict``."""
    model = own() if kind == "own" else swapped("mixtral")
    model.config.rms_norm_eps = float("inf")  # JSON has no number for it
    model.save_pretrained(tmp_path)
    read = type(model.config).from_json_file(tmp_path / "config.json")
    whole = type(model.config).from_pretrained(tmp_path)
    assert read.to_dict() == whole.to_dict()
    assert read.initializer_range == model.config.initializer_range


@pytest.mark.parametrize("name", few_families(FAMILIES))
def test_what_stays_in_float32_is_there(name):
    """The routers of a swap do, and no tensor of those that are gone is named."""
    model = swapped(name)
    built = type(model)(model.config)
    tensors = list(built.state_dict())
    strict, others = built._keep_in_fp32_modules_strict, built._keep_in_fp32_modules
    for part in (*strict, *others):
        assert any(re.search(rf"(?:^|\.){part}(?:\.|$)", tensor) for tensor in tensors), part
    paths = {path for path, part in built.named_modules() if isinstance(part, Router)}
    assert paths and paths <= strict


def test_other_heads_open_the_same_routers(tmp_path):
    model = swapped("mixtral")
    model.save_pretrained(tmp_path)
    headless = AutoModel.from_pretrained(tmp_path)
    classifier = AutoModelForSequenceClassification.from_pretrained(tmp_path, num_labels=3)
    for loaded in (headless, classifier):
        for ours, theirs in zip(_routers(loaded), _routers(model), strict=True):
            assert torch.equal(ours.anchors, theirs.anchors)


def test_a_class_opens_the_folder_by_its_name(tmp_path):
    model = swapped("mixtral")
    model.save_pretrained(tmp_path)
    again = class_registry.L2rMixtralForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(logits(again), logits(model))
    with pytest.raises(AttributeError, match="L2rNoSuchForCausalLM"):
        _ = class_registry.L2rNoSuchForCausalLM


def test_a_pipeline_opens_the_folder_and_a_tokenizer_that_names_no_class(tmp_path):
    model = swapped("mixtral")
    model.save_pretrained(tmp_path)
    words = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({f"w{i}": i for i in range(60)} | {"<unk>": 60}, "<unk>")
    )
    words.save(str(tmp_path / "tokenizer.json"))
    written = pipeline("text-generation", tmp_path)("w3", max_new_tokens=2, do_sample=False)
    assert len(written) == 1


def test_a_class_of_ours_opens_no_folder_of_another_family(tmp_path):
    tiny_model(FAMILIES["mixtral"]).save_pretrained(tmp_path)
    kind = type(swapped("mixtral"))
    with pytest.raises(ValueError, match="must have l2r_swap"):
        kind.from_pretrained(tmp_path)


def test_pickle_finds_the_classes_by_name():
    model = swapped("mixtral")
    again = pickle.loads(pickle.dumps(model))
    assert type(again) is type(model)
    assert torch.equal(logits(again), logits(model))


def test_a_model_that_was_opened_from_a_folder_no_longer_says_so_once_swapped(tmp_path):
    tiny_model(FAMILIES["mixtral"]).save_pretrained(tmp_path)
    model = swap_routers(AutoModelForCausalLM.from_pretrained(tmp_path), CONFIG)
    # TRL builds its reference model from this path, DPO's and GRPO's.
    with pytest.raises(Exception, match="save_pretrained it and load that folder"):
        AutoModelForCausalLM.from_pretrained(model.config._name_or_path)


@pytest.mark.parametrize("layers", [None, [0]])
def test_our_own_model_swapped_in_part_or_again_opens_as_it_is(layers, tmp_path):
    model = swap_routers(own(), XMoEConfig(rank=2), layers=layers)
    model.save_pretrained(tmp_path / "once")
    assert torch.equal(
        logits(AutoModelForCausalLM.from_pretrained(tmp_path / "once")), logits(model)
    )
    swap_routers(model, CONFIG)  # in every layer: what our own configuration can say
    assert type(model) is L2rOlmoeForCausalLM
    model.save_pretrained(tmp_path / "again")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "again")
    assert type(loaded) is L2rOlmoeForCausalLM
    assert torch.equal(logits(loaded), logits(model))


def test_a_folder_of_0_2_opens_by_load_pretrained(tmp_path):
    model = swapped("mixtral")
    model.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    values = json.loads(path.read_text())
    for field in ("auto_map", "initializer_range", "l2r_initializer_range"):
        del values[field]
    values |= {"model_type": "mixtral", "architectures": ["MixtralForCausalLM"]}
    path.write_text(json.dumps(values))
    loaded = l2r.load_pretrained(tmp_path)
    assert torch.equal(logits(loaded), logits(model))
    loaded.save_pretrained(tmp_path / "new")
    assert (
        type(AutoModelForCausalLM.from_pretrained(tmp_path / "new")) is type(loaded) is type(model)
    )


WITHOUT_US = r"""
import json, sys
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, MixtralForCausalLM, pipeline
folder, messages = sys.argv[1], {}
loaders = {
    "auto": AutoModelForCausalLM.from_pretrained,
    "headless": AutoModel.from_pretrained,
    "trusting": lambda path: AutoModelForCausalLM.from_pretrained(path, trust_remote_code=True),
    "config": AutoConfig.from_pretrained,
    "family": MixtralForCausalLM.from_pretrained,
    "pipeline": lambda path: pipeline("text-generation", path),
}
for name, load in loaders.items():
    try:
        messages[name] = "opened as " + type(load(folder)).__name__
    except Exception as error:
        messages[name] = str(error)
assert "l2r" not in sys.modules
print("\n" + json.dumps(messages))
"""


@pytest.mark.slow("fresh processes")
def test_without_the_package_every_loader_stops_and_names_it(tmp_path):
    swapped("mixtral").save_pretrained(tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_US, tmp_path],
        capture_output=True,
        text=True,
        check=True,
        stdin=subprocess.DEVNULL,
    )
    messages = json.loads(done.stdout.splitlines()[-1])
    assert len(messages) == 6
    for name, message in messages.items():
        assert "pip install 'l2r-moe" in message, (name, message)
        # transformers recommends trust_remote_code behind our words
        stop = "trust_remote_code does not open it, though transformers names it next."
        assert name == "family" or stop in message, (name, message)


def test_a_folder_with_the_note_of_0_4_opens_and_gets_the_present_one(tmp_path):
    model = swapped("mixtral")
    model.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    text = path.read_text()
    path.write_text(re.sub(r"; trust_remote_code[^-]*--", "--", text))
    assert path.read_text() != text
    AutoModelForCausalLM.from_pretrained(tmp_path).save_pretrained(tmp_path)
    assert path.read_text() == text


def _routers(model):
    return [module for module in model.modules() if isinstance(module, Router)]

"""Every way of loading refuses weights that are missing, left over, of other shapes, not finite."""

import json
import math
import re
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models
from transformers import AutoConfig, AutoModelForCausalLM, OlmoeConfig, OlmoeForCausalLM, ViTConfig
from transformers import ViTForImageClassification as ViT

from l2r.hf.checkpoints import load_causal_lm, load_image_classifier, load_pretrained
from l2r.hf.checkpoints.export import as_l2r_olmoe
from l2r.hf.checkpoints.placement import weight_bytes
from l2r.hf.checkpoints.pretrained import model_like
from l2r.hf.models import (
    L2rOlmoeConfig,
    L2rOlmoeForCausalLM,
    L2rViTForImageClassification,
    weight_files,
)
from l2r.hf.models.vit import L2rViTConfig
from l2r.hf.models.weight_files import check_finite
from l2r.hf.swap import swap_routers
from l2r.hf.swap.families import FAMILIES
from l2r.routers import L2RConfig
from tests.analysis.diagnostics.models import ours
from tests.hf.families import TINY, auto_class, sample_tokens, tiny_model
from tests.tiers import few_families

GATE = "model.layers.0.mlp.gate"
IMAGES = {
    "hidden_size": 32,
    "num_attention_heads": 2,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "image_size": 16,
    "patch_size": 4,
    "num_labels": 5,
}


def stock():
    return OlmoeForCausalLM(OlmoeConfig(**TINY, num_experts=8))


def own():
    router = {"kind": "l2r_sips", "rank": 2, "heads": 4}
    return L2rOlmoeForCausalLM(L2rOlmoeConfig(**TINY, num_experts=8, router=router))


def swapped():
    return swap_routers(stock(), L2RConfig(rank=2, heads=4))


def images():
    return L2rViTForImageClassification(L2rViTConfig(**IMAGES, num_experts=4, moe_layers=[1]))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    root = tmp_path_factory.mktemp("saved")
    for make in (stock, own, swapped, images):
        torch.manual_seed(0)
        make().save_pretrained(root / make.__name__)
    ViT(ViTConfig(**IMAGES)).save_pretrained(root / "dense")
    return root


@pytest.fixture
def copied(saved, tmp_path):
    """``copied("stock")``: a folder that a test may damage."""
    return lambda name: shutil.copytree(saved / name, tmp_path / name)


def test_shapes_of_a_damaged_file_name_it(copied):
    path = copied("stock") / "model.safetensors"
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(ValueError, match=r"model\.safetensors cannot be read: "):
        weight_files.read_config(path.parent)


def change_weights(folder, change):
    path = folder / "model.safetensors"
    weights = load_file(path)
    change(weights)
    save_file(weights, path, metadata={"format": "pt"})


def change_config(folder, **values):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def first(weights, word):
    return next(name for name in sorted(weights) if word in name)


def without(word):
    def change(weights):
        for name in [name for name in weights if word in name]:
            del weights[name]

    return change


def with_other(weights):
    weights["model.layers.0.other.weight"] = torch.zeros(1)


def narrower(word):
    def change(weights):
        name = first(weights, word)
        weights[name] = weights[name][..., 1:].contiguous()

    return change


def filled(word, value):
    def change(weights):
        weights[first(weights, word)].view(-1)[3] = value

    return change


def all_nan(weights):
    for value in weights.values():
        value.fill_(torch.nan)


ROUTER = {"stock": "mlp.gate.weight", "own": "mlp.gate.anchors", "swapped": "mlp.gate.anchors"}
ROUTER["images"] = "mlp.router.anchors"
LOAD = dict.fromkeys(("stock", "own", "swapped"), load_pretrained)
LOAD["images"] = load_image_classifier


@pytest.mark.parametrize("kind", LOAD)
@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ("missing", r"missing .*{router}"),
        ("empty", r"holds? no tensors"),
        ("unexpected", r"not in the model .*layers\.0\.other\.weight"),
        ("shape", r"{router} is \[.*\] in the files and \[.*\] in the model"),
        ("nan", r"not finite .*{router}"),
        ("infinite", r"not finite .*{router}"),
        ("all nan", r"not finite"),
    ],
)
def test_broken_weights_are_refused_on_one_line(copied, kind, damage, message):
    folder, router = copied(kind), ROUTER[kind]
    changes = {
        "missing": without(router),
        "empty": dict.clear,
        "unexpected": with_other,
        "shape": narrower(router),
        "nan": filled(router, torch.nan),
        "infinite": filled(router, -torch.inf),
        "all nan": all_nan,
    }
    change_weights(folder, changes[damage])
    with pytest.raises(ValueError, match=message.format(router=re.escape(router))) as error:
        LOAD[kind](folder)
    assert "\n" not in str(error.value) and str(error.value).count(".weight") <= 4


def test_the_message_names_three_tensors_and_counts_the_others(copied):
    folder = copied("stock")
    change_weights(folder, all_nan)
    with pytest.raises(ValueError, match=r"and \d+ more") as error:
        load_pretrained(folder)
    assert str(error.value).count("model.layers.") + str(error.value).count("embed") <= 3


@pytest.mark.parametrize("change", [without(".3.up_proj"), narrower(".experts.3.up_proj")])
def test_an_expert_that_is_not_whole_is_named(copied, change):
    folder = copied("stock")
    change_weights(folder, change)
    with pytest.raises(ValueError, match=r"model\.layers\.\d\.mlp\.experts\.3\.up_proj\.weight"):
        load_pretrained(folder)


def test_experts_without_one_of_their_matrices_are_refused(copied):
    folder = copied("stock")
    change_weights(folder, without(".up_proj"))
    with pytest.raises(ValueError, match="experts"):
        load_pretrained(folder)


def test_a_missing_last_expert_is_a_shape_that_differs(copied):
    folder = copied("stock")
    change_weights(folder, without(".experts.7."))
    with pytest.raises(ValueError, match=r"experts.* is \[7, .*\] in the files and \[8, "):
        load_pretrained(folder)


@pytest.mark.parametrize("kind", ["stock", "own", "swapped"])
@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"num_hidden_layers": -1}, "num_hidden_layers must be >= 1; got -1"),
        ({"num_hidden_layers": 10**9}, r"num_hidden_layers must be <= \d+.*got 1000000000"),
        ({"hidden_size": 0}, "hidden_size must be >= 1; got 0"),
        ({"hidden_size": 10**9}, r"hidden_size must be <= [\d,]+.*got 1000000000"),
        ({"vocab_size": 10**12}, r"vocab_size must be <= [\d,]+"),
        ({"num_experts": -1}, "num_experts must be >= 0; got -1"),
        ({"num_experts": 10**9}, r"num_experts must be <= [\d,]+"),
        ({"num_attention_heads": 0}, "num_attention_heads must be >= 1; got 0"),
        ({"intermediate_size": 10**9}, r"config.json describes [\d,]+ parameters.* hold [\d,]+"),
        ({"num_experts_per_tok": 9}, "experts per token|num_experts_per_tok|top_k"),
        ({"num_experts_per_tok": 0}, "experts per token|num_experts_per_tok|top_k"),
        ({"num_hidden_layers": 1}, r"not in the model .*layers\.1\.|layers must name .* got 1"),
        ({"num_hidden_layers": 3}, r"missing .*model\.layers\.2\."),
    ],
)
def test_sizes_that_the_files_cannot_hold_are_refused(copied, kind, values, message):
    folder = copied(kind)
    change_config(folder, **values)
    with pytest.raises(ValueError, match=message) as error:
        load_pretrained(folder)
    assert "\n" not in str(error.value)


def test_a_length_that_no_tensor_has_is_not_refused(copied):
    folder = copied("stock")
    change_config(folder, max_position_embeddings=10**9)
    assert load_pretrained(folder).config.max_position_embeddings == 10**9


def test_a_router_that_the_files_cannot_hold_is_refused(copied):
    for changes in ({"rank": 10**9}, {"heads": 10**9}):
        folder = copied("own")
        config = json.loads((folder / "config.json").read_text())
        change_config(folder, router=config["router"] | changes)
        with pytest.raises(ValueError, match=r"must be|config\.json describes"):
            load_pretrained(folder)
        shutil.rmtree(folder)


def test_quantized_files_may_pack_their_parameters(copied, monkeypatch):
    """Sixteen parameters to a number are no reason to refuse; without a quantizer they are."""
    monkeypatch.setattr("l2r.hf.models.weight_files._MAX_MISSING", 0)
    folder = copied("stock")
    shapes = weight_files._stored_shapes(folder)
    few = {"packed": (sum(math.prod(shape) for shape in shapes.values()) // 12,)}
    config = AutoConfig.from_pretrained(folder)
    with pytest.raises(ValueError, match=r"config\.json describes"):
        weight_files._check_parameters(AutoModelForCausalLM, config, few, trust_remote_code=False)
    config.quantization_config = {"quant_method": "gptq"}
    weight_files._check_parameters(AutoModelForCausalLM, config, few, trust_remote_code=False)


def test_sizes_of_images_are_refused_too(copied):
    for values, message in (
        ({"num_hidden_layers": 10**9}, "num_hidden_layers must be <="),
        ({"image_size": 10**6}, "config.json describes"),
    ):
        folder = copied("images")
        change_config(folder, **values)
        with pytest.raises(ValueError, match=message):
            load_image_classifier(folder)
        shutil.rmtree(folder)


def test_averaged_weights_and_other_doors_refuse_them(copied, tmp_path):
    for kind in ("own", "images", "dense"):
        change_weights(copied(kind), without(".1."))
    (tmp_path / "run").mkdir()
    (tmp_path / "images").rename(tmp_path / "run" / "model-ema")
    with pytest.raises(ValueError, match=r"missing .*layers\.1\."):
        load_image_classifier(tmp_path / "run", averaged=True)
    with pytest.raises(ValueError, match=r"missing .*layers\.1\."):
        load_causal_lm(tmp_path / "own")
    with pytest.raises(ValueError, match=r"missing .*layers\.1\."):
        model_like(own().config, tmp_path / "own")
    with pytest.raises(ValueError, match=r"missing .*layers\.1\."):
        L2rViTForImageClassification.from_dense(tmp_path / "dense")


def test_a_dense_start_needs_no_classifier_and_may_have_a_pooler(copied):
    def headless(weights):
        without("classifier.")(weights)
        weights["vit.pooler.dense.weight"] = torch.zeros(32, 32)

    folder = copied("dense")
    before = load_file(folder / "model.safetensors")
    change_weights(folder, headless)
    model = L2rViTForImageClassification.from_dense(folder)
    name = "vit.embeddings.cls_token"
    assert torch.equal(model.state_dict()[name], before[name])


def test_a_command_refuses_them_with_one_line(l2r, copied):
    folder = copied("stock")
    Tokenizer(models.WordLevel({"<unk>": 0}, unk_token="<unk>")).save(
        str(folder / "tokenizer.json")
    )
    change_weights(folder, without(".gate."))
    for command in (("eval", folder, "--tasks", "piqa"), ("diagnose", folder), ("export", folder)):
        line = l2r(
            *command, *(["--out", folder / "new"] if command[0] == "export" else [])
        ).refusal()
        assert f"{GATE}.weight" in line, line
        assert not (folder / "new").exists()


def test_a_model_in_memory_is_exported_whole_or_not_at_all():
    model = swapped()
    model.model.layers[1].mlp.gate.register_parameter("extra", torch.nn.Parameter(torch.zeros(1)))
    with pytest.raises(ValueError, match=r"layers\.1\.mlp\.gate\.extra"):
        as_l2r_olmoe(model)


def test_a_model_of_ours_that_was_swapped_is_exported_as_one_of_ours(l2r, tmp_path):
    ours("l2r_sips").save_pretrained(tmp_path / "own")
    swap = ("swap", tmp_path / "own", "kind=linear", "--selection", "router")
    assert l2r(*swap, "--out", tmp_path / "a").code == 0
    assert l2r("export", tmp_path / "a", "--out", tmp_path / "b").code == 0
    values = json.loads((tmp_path / "b" / "config.json").read_text())
    assert values["router"]["kind"] == "linear" and "swapped_from" not in values
    ids = torch.arange(2, 22).view(2, 10)
    models = (load_pretrained(tmp_path / name) for name in "ab")
    first, second = (model(ids).logits for model in models)
    torch.testing.assert_close(first, second, rtol=0, atol=0)


def test_tensors_without_numbers_of_their_own_are_not_looked_at():
    """Offloaded, packed, or in a quantizer's eight bits; others beside them are."""
    meta = torch.full((2,), torch.nan, device="meta")
    eight = torch.full((2,), torch.nan).to(torch.float8_e4m3fn)
    fine = {"meta": meta, "eight": eight, "packed": torch.ones(2, dtype=torch.int32)}
    fine |= {"empty": torch.zeros(0), "scalar": torch.tensor(1.0), "bool": torch.tensor([True])}
    check_finite(fine.items())
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        for value in (torch.nan, torch.inf, -torch.inf):
            broken = torch.tensor([1.0, value], dtype=dtype)
            with pytest.raises(ValueError, match=r"^weights are not finite \(broken\)$"):
                check_finite({**fine, "broken": broken}.items())


@pytest.mark.parametrize("family", few_families(FAMILIES))
def test_what_transformers_saved_loads_in_every_family(tmp_path, family):
    """Tied weights, buffers that are not saved and converted experts are no faults."""
    model = tiny_model(FAMILIES[family])
    model.save_pretrained(tmp_path)
    loaded = load_pretrained(tmp_path)
    theirs = auto_class(model.config).from_pretrained(tmp_path).state_dict()
    ours = loaded.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], value) for name, value in theirs.items())
    assert loaded(sample_tokens()).logits.isfinite().all()


@pytest.mark.parametrize("stored", ["safetensors", "pickled", "nothing"])
@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"num_labels": 10**7}, r"num_labels must be <= [\d,]+"),
        ({"num_hidden_layers": 10**7}, r"num_hidden_layers must be <= [\d,]+"),
        ({"vision_config": {"a": [{"depth": 10**6}]}}, "depth must be <= 2,000; got 1000000"),
        ({"text_config": {"decoder_layers": 10**6}}, "decoder_layers must be <= 2,000; got 1000"),
        ({"depths": [1, 10**6]}, "depths must be <= 2,000; got 1000000"),
        ({"layer_types": ["a"] * 1_000_001}, "layer_types must have <= 1,000,000 entries; got"),
        ({"num_nextn_predict_layers": 10**6}, "num_nextn_predict_layers must be <= 2,000; got"),
    ],
)  # fmt: skip
def test_counts_are_refused_before_anything_is_built(
    copied, values, message, stored, monkeypatch, unchecked
):
    """Also beside weights whose sizes are not known before they are read, or without weights."""
    folder = copied("stock")
    if stored != "safetensors":
        weights = load_file(folder / "model.safetensors")
        (folder / "model.safetensors").unlink()
        if stored == "pickled":
            torch.save(weights, folder / "pytorch_model.bin")
    change_config(folder, **values)
    monkeypatch.setattr(AutoConfig, "from_pretrained", lambda *_, **__: pytest.fail("built"))
    with pytest.raises(ValueError, match=message):
        load_pretrained(folder)


def test_buffers_are_refused_that_no_model_has(tmp_path):
    tiny_model(FAMILIES["glm4_moe"]).save_pretrained(tmp_path)
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1e9}
    change_config(tmp_path, rope_parameters=rope)
    with pytest.raises(ValueError, match=r"config.json describes buffers of [\d,]+ numbers"):
        load_pretrained(tmp_path)


@pytest.mark.parametrize(
    "name", ["../outside/a.safetensors", "/a.safetensors", "..", "", "b/a", "b\\a"]
)
@pytest.mark.parametrize(
    "index",
    ["model.safetensors.index.json", "pytorch_model.bin.index.json", "x.safetensors.index.json"],
)  # fmt: skip
def test_an_index_names_files_of_its_folder_alone(copied, name, index):
    folder = copied("stock")
    outside = folder.parent / "outside"
    outside.mkdir()
    names = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").rename(outside / "a.safetensors")
    (folder / index).write_text(
        json.dumps({"metadata": {}, "weight_map": dict.fromkeys(names, name)})
    )
    change_config(folder, transformers_weights="x.safetensors.index.json")
    with pytest.raises(ValueError, match=rf"{index} must name files of its folder; got"):
        load_pretrained(folder)
    if index != "x.safetensors.index.json":
        with pytest.raises(ValueError, match=rf"{index} must name files of its folder; got"):
            weight_files.files_of_weights(folder)
    if index == "model.safetensors.index.json":
        with pytest.raises(ValueError, match=rf"{index} must name files of its folder; got"):
            weight_bytes(folder)


@pytest.mark.parametrize(
    "content", [{}, {"weight_map": 5}, {"weight_map": {"a": 5}}, {"weight_map": []}]
)
def test_an_index_without_names_is_refused(copied, content):
    folder = copied("stock")
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps(content))
    for reads in (load_pretrained, weight_files.files_of_weights):
        with pytest.raises(ValueError, match="weight_map"):
            reads(folder)


@pytest.mark.parametrize("name", ["../outside.safetensors", "/a.safetensors", "a/b.safetensors"])
def test_weights_that_the_configuration_names_are_of_its_folder(copied, name):
    folder = copied("stock")
    change_config(folder, transformers_weights=name)
    with pytest.raises(ValueError, match="transformers_weights must name files of its folder; got"):
        load_pretrained(folder)

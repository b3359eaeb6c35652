"""The model card: what it says, that its code runs, and that an edited one is kept."""

import hashlib
import re

import pytest
import torch
from huggingface_hub import ModelCard

from l2r import L2RConfig
from l2r.hf.checkpoints import export_remote_code
from l2r.hf.checkpoints.pretrained import save_model
from l2r.hf.models import L2rOlmoeConfig, L2rOlmoeForCausalLM, L2rViTConfig
from l2r.hf.models.card import CARD, is_untouched, table
from l2r.hf.models.vit import L2rViTForImageClassification
from l2r.hf.swap import swap_routers
from l2r.hf.swap.families import FAMILIES
from l2r.routers import Router
from tests.hf.families import TINY, tiny_model
from tests.processes import script

CODE = re.compile(r"```python\n(.*?)```", re.S)


def olmoe(**router):
    sizes = {k: v for k, v in TINY.items() if k != "moe_intermediate_size"}
    router = {"kind": "l2r_sips", "rank": 2, "heads": 3} | router
    return L2rOlmoeForCausalLM(L2rOlmoeConfig(**sizes, num_experts=8, router=router))


def vit():
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}
    images = {"image_size": 8, "patch_size": 4, "num_channels": 1, "num_labels": 3}
    moe = {"num_experts": 4, "num_hidden_layers": 3, "moe_layers": [1, 2]}
    return L2rViTForImageClassification(L2rViTConfig(**sizes, **images, **moe))


def swapped():
    return swap_routers(tiny_model(FAMILIES["mixtral"]), L2RConfig(rank=2, heads=3), layers=[1])


def read(folder) -> ModelCard:
    text = (folder / CARD).read_text()
    assert is_untouched(text)
    return ModelCard(text)


def test_the_card_of_a_model_without_a_run_says_what_is_known_and_no_more(tmp_path):
    model = olmoe()
    model.add_model_tags("mine")
    model.save_pretrained(tmp_path)
    card = read(tmp_path)
    assert card.data.to_dict() == {
        "library_name": "l2r-moe",
        "license": "unknown",
        "pipeline_tag": "text-generation",
        "tags": ["mixture-of-experts", "l2r", "l2r_sips", "mine"],
    }
    routers = [m for m in model.modules() if isinstance(m, Router)]
    own = sum(p.numel() for m in routers for p in m.parameters())
    every = sum(p.numel() for p in model.parameters())
    assert f"{every:,} parameters, {own:,} of them in routers" in card.text
    assert "| experts | 8 |" in card.text and "| `heads` | 3 |" in card.text
    assert "How the weights were made is not recorded here" in card.text
    titles = re.findall(r"^## (.+)", card.text, re.M)
    assert titles == ["Router of layers 0, 1", "How to load it", "Limits"]


def test_an_image_classifiers_card_names_its_layers_and_its_use(tmp_path):
    vit().save_pretrained(tmp_path)
    card = read(tmp_path)
    assert card.data.pipeline_tag == "image-classification"
    assert "## Router of layers 1, 2" in card.text and "l2r export" not in card.text


def test_a_swapped_models_card_has_the_layers_with_our_router_alone(tmp_path):
    save_model(swapped(), tmp_path / "out")
    card = read(tmp_path / "out")
    assert "## Router of layer 1\n" in card.text
    rule = "that of mixtral: gate softmax, normalize True"
    assert f"| selection | {rule} |" in card.text and "normalize_weights" not in card.text


def test_the_repr_of_a_swapped_router_has_the_rule_in_force():
    (router,) = (module for module in swapped().modules() if isinstance(module, Router))
    shown = repr(router)
    assert "Selection(normalize=True, family='mixtral')" in shown
    assert "normalize_weights" not in shown and "rank=2, heads=3" in shown
    assert "normalize_weights=False" in repr(olmoe().model.layers[0].mlp.gate)


def test_the_code_of_every_card_loads_the_model(tmp_path):
    for name, model in (("olmoe", olmoe()), ("vit", vit()), ("swapped", swapped())):
        save_model(model, tmp_path / name)
        torch.save(model.state_dict(), tmp_path / f"{name}.pt")
    blocks = {n: CODE.findall(read(tmp_path / n).text) for n in ("olmoe", "vit", "swapped")}
    code = "import torch\n"
    for name, (block,) in blocks.items():
        code += block.replace("FOLDER", str(tmp_path / name))
        code += f"""
saved = torch.load({str(tmp_path / name)!r} + ".pt")
assert all(torch.equal(v, saved[n]) for n, v in model.state_dict().items())
"""
    script(tmp_path, code, HF_HUB_OFFLINE="1").succeed()


def test_a_card_is_written_again_until_a_person_edits_it(tmp_path):
    olmoe().save_pretrained(tmp_path)
    first = (tmp_path / CARD).read_text()
    olmoe(heads=5).save_pretrained(tmp_path)
    second = (tmp_path / CARD).read_text()
    assert first != second and "| `heads` | 5 |" in second
    mine = second.replace("license: unknown", "license: mit")
    (tmp_path / CARD).write_text(mine)
    with pytest.warns(UserWarning, match=rf"{CARD} was edited, .* remove it and save again"):
        olmoe().save_pretrained(tmp_path)
    assert (tmp_path / CARD).read_text() == mine
    (tmp_path / CARD).write_bytes(second.replace("\n", "\r\n").encode())  # git did, not a person
    olmoe().save_pretrained(tmp_path)
    assert (tmp_path / CARD).read_text() == first


def test_a_card_of_0_3_is_written_again_unless_it_was_edited(tmp_path):
    """Its last line had other words around the checksum."""
    olmoe().save_pretrained(tmp_path)
    text, mark = (tmp_path / CARD).read_text().rsplit("<!--", 1)
    text += "Of 0.3.\n\n"
    total = hashlib.sha256(text.encode()).hexdigest()
    words = "Written by l2r-moe; kept as it is once its text has another sum than"
    old = f"{text}<!-- {words} {total} -->\n"
    assert "edited cards are not overwritten" in mark
    assert is_untouched(old) and not is_untouched(old.replace("Of 0.3", "Of me"))


def test_a_card_of_another_tool_is_kept(tmp_path):
    (tmp_path / CARD).write_text("# Mine\n")
    with pytest.warns(UserWarning, match="was edited"):
        olmoe().save_pretrained(tmp_path)
    assert (tmp_path / CARD).read_text() == "# Mine\n"


def test_only_the_main_process_writes_a_card(tmp_path):
    olmoe().save_pretrained(tmp_path, is_main_process=False)
    assert not (tmp_path / CARD).exists()


def test_code_that_is_not_in_the_folder_is_not_promised(tmp_path):
    model = olmoe()
    model.config.auto_map = {"AutoModelForCausalLM": "modeling.Model"}  # loaded from an export
    model.save_pretrained(tmp_path)
    assert read(tmp_path).data.library_name == "l2r-moe"


def test_no_name_breaks_a_row_of_a_card():
    """Names of domains are names of folders, which may have any of these."""
    shown = table([("a|b", "c\nd"), ("plain", 1234)], ("fact", "value"))
    assert shown.splitlines()[2:] == ["| a\\|b | c d |", "| plain | 1,234 |"]


@pytest.mark.parametrize(
    ("name", "auto", "use"),
    [
        ("qwen3_vl_moe", "AutoModelForImageTextToText", "image-text-to-text"),
        ("openai_privacy_filter", "AutoModelForTokenClassification", "token-classification"),
    ],
)
def test_the_card_of_a_wrapper_or_a_classifier_opens_it_as_what_it_is(name, auto, use, tmp_path):
    model = swap_routers(tiny_model(FAMILIES[name]), L2RConfig(rank=2, heads=2))
    text = (export_remote_code(model, tmp_path / "out") / "README.md").read_text()
    assert f"model = {auto}.from_pretrained" in text and f"pipeline_tag: {use}" in text

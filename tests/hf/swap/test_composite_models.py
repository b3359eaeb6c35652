"""Models whose language model is one part of several: swapped, saved, opened, refused."""

import pytest
import torch
from transformers import (
    AutoModelForImageTextToText,
    CLIPVisionConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    MixtralConfig,
    PreTrainedConfig,
    Qwen3_5MoeConfig,
    Qwen3_5MoeForConditionalGeneration,
)

import l2r
from l2r.hf.models.opening import NeedsPackage
from l2r.hf.swap import router_sites, swap_routers
from l2r.routers.observe import find_routers, other_routers
from tests.hf.omni import omni

SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}


def llava():
    text = {"num_key_value_heads": 2, "num_local_experts": 4, "head_dim": 16}
    sight = CLIPVisionConfig(
        **SMALL, intermediate_size=32, image_size=8, patch_size=4, projection_dim=16
    )
    words = MixtralConfig(**SMALL, **text, vocab_size=64, intermediate_size=32)
    return LlavaForConditionalGeneration(LlavaConfig(vision_config=sight, text_config=words))


def qwen():
    text = {
        **SMALL,
        "vocab_size": 64,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16,
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "layer_types": ["linear_attention", "full_attention"],
    }
    sight = {
        "depth": 1,
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_heads": 2,
        "out_hidden_size": 32,
        "patch_size": 4,
    }
    return Qwen3_5MoeForConditionalGeneration(
        Qwen3_5MoeConfig(text_config=text, vision_config=sight)
    )


@pytest.fixture(params=[llava, qwen])
def swapped(request):
    return swap_routers(request.param().eval(), l2r.L2RConfig(rank=4, heads=2))


@torch.no_grad()
def test_it_opens_with_the_routers_that_were_saved(swapped, tmp_path):
    swapped.save_pretrained(tmp_path)
    ids = torch.randint(0, 60, (2, 6))
    logits = swapped(input_ids=ids).logits
    for opened in (
        l2r.load_pretrained(tmp_path),
        AutoModelForImageTextToText.from_pretrained(tmp_path),
    ):
        assert type(opened) is type(swapped)
        opened.load_state_dict(swapped.state_dict())  # all names are there; copies, not mapped
        torch.testing.assert_close(opened(input_ids=ids).logits, logits, rtol=0, atol=0)
    again = l2r.load_pretrained(tmp_path)
    for name, value in swapped.state_dict().items():
        assert torch.equal(value, again.state_dict()[name]), name
    assert again.config.tie_word_embeddings is swapped.config.tie_word_embeddings
    assert not hasattr(again.config, "l2r_tie_word_embeddings")


def test_the_familys_own_class_refuses_it_and_names_the_package(swapped, tmp_path):
    stock = next(c for c in type(swapped).__mro__ if c.__module__.startswith("transformers.models"))
    swapped.save_pretrained(tmp_path)
    with pytest.raises(Exception, match="pip install 'l2r-moe"):
        stock.from_pretrained(tmp_path)


def test_a_configuration_without_a_field_for_the_note_is_saved_and_read_too(tmp_path):
    class Bare(NeedsPackage, PreTrainedConfig):
        model_type = "bare"

    Bare().save_pretrained(tmp_path)
    assert "l2r-moe" in (tmp_path / "config.json").read_text()
    assert not Bare.from_pretrained(tmp_path).auto_map


@torch.no_grad()
def test_an_omni_folder_opens_as_its_thinker_and_its_talker_stands_apart(tmp_path):
    whole = omni()
    whole.save_pretrained(tmp_path)
    opened = l2r.load_pretrained(tmp_path)
    assert type(opened) is type(whole.thinker)
    ids = torch.randint(3, 60, (2, 6))
    opened.load_state_dict(whole.thinker.state_dict())  # all names are there; copies, not mapped
    assert torch.equal(opened(input_ids=ids).logits, whole.thinker(input_ids=ids).logits)
    found = {f"thinker.{name}" for name in find_routers(opened)}
    assert found == set(find_routers(whole)) == {s.path for s in router_sites(whole)}
    assert [name.partition(".")[0] for name in other_routers(whole)] == ["talker", "talker"]
    with pytest.warns(UserWarning, match="save_pretrained refuses .* talker_config"):
        swap_routers(l2r.load_pretrained(tmp_path))

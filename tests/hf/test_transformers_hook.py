"""What ``import l2r`` puts in the place of functions of transformers takes what those take."""

import inspect

import pytest
from transformers import PreTrainedModel, Trainer

from l2r.hf.swap.families import FAMILIES
from tests.hf.families import tiny_model

REPLACED = [
    (PreTrainedModel, "from_pretrained"),
    (Trainer, "_load_from_checkpoint"),
    (Trainer, "_load_best_model"),
    (Trainer, "evaluation_loop"),
]


def test_a_folder_is_opened_by_the_name_of_the_argument(tmp_path):
    model = tiny_model(FAMILIES["mixtral"])
    model.save_pretrained(tmp_path)
    kind = type(model)
    opened = kind.from_pretrained(pretrained_model_name_or_path=tmp_path)
    assert opened.num_parameters() == model.num_parameters()
    drawn = kind.from_pretrained(
        pretrained_model_name_or_path=None, config=model.config, state_dict=model.state_dict()
    )
    assert drawn.lm_head.weight.equal(model.lm_head.weight)


@pytest.mark.parametrize(("owner", "name"), REPLACED)
def test_what_replaces_a_function_binds_each_call_of_it(owner, name):
    """By position and by name, with none of the optional arguments and with all."""
    ours = getattr(owner, name)
    ours = getattr(ours, "__func__", ours)
    theirs = inspect.signature(ours.__wrapped__)
    taken = inspect.signature(ours, follow_wrapped=False)
    assert ours.__module__ == ours.__wrapped__.__module__  # wraps: else it is no function of ours
    assert ours is not ours.__wrapped__
    plain = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    every = [p for p in theirs.parameters.values() if p.kind in plain]
    needed = [p for p in every if p.default is p.empty]
    for given in (needed, every):
        taken.bind(**{p.name: None for p in given})
        positional = [p for p in given if p.kind is p.POSITIONAL_OR_KEYWORD]
        taken.bind(
            *[None for _ in positional], **{p.name: None for p in given if p not in positional}
        )

"""An export is compared with the engine's model, and differences beyond rounding refuse it."""

from copy import deepcopy

import pytest
import torch

from l2r.engines.olmoe_tensors import olmoe
from l2r.engines.proof import on_first_rank, prove
from l2r.errors import InputError
from l2r.hf.routes import record, replay, routed_layers
from l2r.routers import RouterConfig
from tests.engines.engines import SIPS
from tests.processes import on_two_ranks

POSITIONS = 64


def small(router=SIPS, scale=4.0, **fields):
    """An OLMoE whose layers matter for its logits, as those of a trained model do."""
    sizes = {
        "vocab_size": 97,
        "hidden_size": 32,
        "intermediate_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "max_position_embeddings": POSITIONS,
    }
    torch.manual_seed(0)
    model = olmoe(RouterConfig.from_dict(router), **sizes | fields)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "_proj" in name or "gate.anchors" in name:
                p.mul_(scale)
    return model.eval()


def forward_of(model):
    return lambda ids: model(ids).logits


def test_a_copy_is_equal_with_and_without_its_routes():
    made = small()
    engine = deepcopy(made)
    prove(forward_of(engine), made, positions=POSITIONS, record=record(engine))
    prove(forward_of(engine), made, positions=POSITIONS)


@pytest.mark.parametrize("api", ["legacy", "new"])
def test_products_are_whole_inside_and_as_the_user_set_them_afterwards(api):
    """torch's two ways of setting their precision; to mix them is an error of torch."""
    made = small()
    matmul, seen = torch.backends.mkldnn.matmul, []

    def forward(ids):
        seen.append((matmul.fp32_precision, torch.backends.cuda.matmul.fp32_precision))
        return forward_of(deepcopy(made))(ids)

    try:
        if api == "new":
            torch.backends.cuda.matmul.fp32_precision = matmul.fp32_precision = "tf32"
        else:
            torch.set_float32_matmul_precision("high")
        prove(forward, made, positions=POSITIONS)
        assert set(seen) == {("ieee", "ieee")}
        assert matmul.fp32_precision == torch.backends.cuda.matmul.fp32_precision == "tf32"
    finally:
        torch.set_float32_matmul_precision("highest")


@pytest.mark.parametrize(
    "fields",
    [
        {"rms_norm_eps": 1e-4},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 9e3}},
        {"clip_qkv": 0.2},
        {"rope_parameters": {"rope_type": "linear", "factor": 1.1, "rope_theta": 1e4}},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_another_setting_is_refused_with_the_difference_and_its_position(fields):
    made, engine = small(), small(**fields)
    engine.load_state_dict(made.state_dict())
    ids = torch.randint(97, (1, POSITIONS), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        first, second = made(ids).logits, engine(ids).logits
    apart = (first - second).abs().amax(-1)[0]
    assert apart.max() > 1e-5 * first.abs().max()
    with pytest.raises(InputError, match=r"at position \d+ of 64 a logit differs by [\d.]+% of"):
        prove(forward_of(engine), made, positions=POSITIONS, record=record(engine))


def test_weights_of_experts_that_differ_are_refused():
    made = small()
    engine = deepcopy(made)
    with torch.no_grad():
        engine.model.layers[1].mlp.experts.down_proj[3] *= 1.001
    with pytest.raises(InputError, match="a logit differs by"):
        prove(forward_of(engine), made, positions=POSITIONS, record=record(engine))


def near_tie(apart):
    """Two experts of one router whose logits differ by a factor 1 + ``apart``."""
    made = small({"kind": "linear"})
    weight = made.model.layers[0].mlp.gate.weight
    with torch.no_grad():
        weight[1] = weight[0]
    engine = deepcopy(made)
    with torch.no_grad():
        engine.model.layers[0].mlp.gate.weight[1] *= 1 + apart
    return made, engine


def test_a_near_tie_is_no_difference():
    made, engine = near_tie(3e-7)
    ids = torch.randint(97, (1, POSITIONS), generator=torch.Generator().manual_seed(0))
    taken = []
    for model in (made, engine):
        with record(model) as recorder, torch.no_grad():
            model(ids)
        taken.append(
            torch.from_numpy(recorder.routes().experts[:, 0].astype("int64")).sort().values
        )
    assert (taken[0] != taken[1]).any()
    prove(forward_of(engine), made, positions=POSITIONS, record=record(engine))


def test_choices_beyond_rounding_are_refused_where_logits_agree():
    """The engine takes what it must not, and weighs it as the Hugging Face model would."""
    made, engine = near_tie(0.0)
    with record(made) as recorder, torch.no_grad():
        made(torch.randint(97, (1, POSITIONS), generator=torch.Generator().manual_seed(0)))
    routes = recorder.routes()
    experts = routes.experts.copy()
    experts[7, 1] = [e for e in range(4) if e not in experts[7, 1]]
    wrong = type(routes)(experts, routes.fingerprint, routes.lengths)

    def forward(ids):
        with replay(engine, wrong):
            return engine(ids).logits

    with pytest.raises(InputError, match=r"in layer 1 1 of 64 tokens, the first at position 7,"):
        prove(forward, made, positions=POSITIONS, record=record(engine))


@pytest.mark.parametrize("bias", [0.0, 0.5])
def test_a_selection_bias_counts(bias):
    made = small({"kind": "sigmoid", "selection_bias": True})
    engine = deepcopy(made)
    engine.model.layers[1].mlp.gate.e_score_correction_bias[2] += bias
    if not bias:
        prove(forward_of(engine), made, positions=POSITIONS, record=record(engine))
        return
    with pytest.raises(InputError, match=r"in layer 1 .* take other experts"):
        prove(forward_of(engine), made, positions=POSITIONS, record=record(engine))


def test_a_model_in_half_precision_is_compared_as_one():
    made = small()
    engine = deepcopy(made)
    for name, p in engine.named_parameters():
        if ".gate." not in name:
            p.data = p.data.bfloat16()
    prove(forward_of(engine), made, positions=POSITIONS, record=record(engine))
    with pytest.raises(InputError, match="a logit differs by"):
        prove(
            lambda ids: engine(ids).logits.float(), made, positions=POSITIONS, record=record(engine)
        )


@pytest.mark.parametrize("fails", ["engine", "made"])
def test_all_is_as_it_was_after_an_error(fails):
    made = small().train()
    made.model.layers[0].eval()
    engine = deepcopy(made).eval()
    tensors = {n: (p.data_ptr(), p.dtype) for n, p in made.named_parameters()}
    buffers = dict(made.named_buffers())
    modes = [m.training for m in made.modules()]
    torch.manual_seed(5)
    state = torch.get_rng_state()

    def fail(ids):
        torch.rand(3)
        raise KeyError("no")

    if fails == "made":
        head = made.lm_head.forward

        def forward(x):
            if x.dtype == torch.float64:
                fail(x)
            return head(x)

        made.lm_head.forward = forward
    with pytest.raises(KeyError):
        prove(
            fail if fails == "engine" else forward_of(engine),
            made,
            positions=POSITIONS,
            record=record(engine),
        )
    assert {n: (p.data_ptr(), p.dtype) for n, p in made.named_parameters()} == tensors
    assert all(buffer is buffers[name] for name, buffer in made.named_buffers())
    assert [m.training for m in made.modules()] == modes
    assert torch.equal(torch.get_rng_state(), state)
    for model in (made, engine):
        for layer in routed_layers(model):
            router = layer.sites[0].router
            assert "forward" not in vars(router) and not router.is_watched()


def test_a_nan_is_a_difference():
    made = small()
    engine = deepcopy(made)

    def forward(ids):
        logits = engine(ids).logits
        logits[0, 9, 3] = torch.nan
        return logits

    with pytest.raises(InputError, match="at position 9 of 64 a logit differs by nan%"):
        prove(forward, made, positions=POSITIONS, record=record(engine))


def fail_on_the_first(rank, error):
    def work():
        raise error("the first rank cannot")

    with pytest.raises((InputError, RuntimeError)) as raised:
        on_first_rank(work)
    return type(raised.value).__name__, str(raised.value), on_first_rank(lambda: rank)


@pytest.mark.slow("two processes")
@pytest.mark.parametrize("error", [InputError, RuntimeError])
def test_what_the_first_rank_raises_is_raised_on_all(error, tmp_path):
    said = "the first rank cannot"
    first, second = on_two_ranks(fail_on_the_first, tmp_path, error, within=60)
    assert first == (error.__name__, said, 0)
    elsewhere = said if error is InputError else f"rank 0 failed: {said}"
    assert second == (error.__name__, elsewhere, None)

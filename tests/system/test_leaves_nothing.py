"""What touches a model leaves the model and the process as they were, also where it fails.

``tests/state.py`` has the list of what is compared: README.md of this folder's parent.
"""

import copy
import gc
import io
import pickle
import re
import tempfile
import weakref
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import Trainer, TrainingArguments

from l2r import L2RConfig, LinearConfig, capture, fit_routers, pin_routes, record, replay
from l2r.analysis.certificates.attack import count_violations, find_flip
from l2r.analysis.certificates.certify import certify, certify_first, holds_within
from l2r.analysis.diagnostics import (
    DiagnosisSettings,
    RouterWatch,
    bf16_copy,
    collect_records,
    count_flips,
    diagnose_layers,
    measure_routing_gain,
    perturbation_stability,
    router_statistics,
)
from l2r.analysis.diagnostics.checks import check_model
from l2r.analysis.routes import compare_models, compare_routes, in_other_arithmetic, read_routing
from l2r.engines.serve.sequence import noting
from l2r.engines.trainer import add_router_losses, add_router_statistics
from l2r.files.mismatch import ARITHMETICS
from l2r.fitting.fit import perplexity
from l2r.fitting.upcycling import upcycle
from l2r.hf.checkpoints import export_program, export_remote_code, save_model
from l2r.hf.models import model_size, reading_whole_sequences, save_refusal
from l2r.hf.models.router_dtypes import routers_keep_dtype
from l2r.hf.routes import fingerprint_of, routed_layers
from l2r.hf.swap import (
    find_sites,
    freeze_routers,
    router_sites,
    selection_biases,
    train_routers_only,
)
from l2r.hf.swap.families import FAMILIES
from l2r.hf.swap.sites import recognition_note
from l2r.hf.swap.swap import replace_routers
from l2r.routers.observe import evaluating, find_routers, watched
from l2r.text import token_losses
from l2r.text.losses_on_text import document_losses
from l2r.text.perplexity import _losses_for_logits
from l2r.text.text_loss import Windows
from l2r_lab.training.average import WeightAverage
from l2r_lab.training.health import explain_loss
from l2r_lab.training.parallel import unchanged_buffers
from l2r_lab.training.ranks import Ranks
from tests.hf.families import BY_RULE, sample_tokens, tiny_model
from tests.state import changes, files_in, process_state, state_of
from tests.tiers import few

IDS = sample_tokens()
CONFIG = L2RConfig(rank=2, heads=2)
ALONE = Ranks(0, 1, torch.device("cpu"))
GENERATION = {"max_new_tokens": 3, "do_sample": True, "pad_token_id": 0}
BEHIND = "torch.fx", "torch.export"  # keep tables of their own for the process


def routes_of(model, **options):
    with torch.no_grad(), record(model, **options) as recorder:
        model(input_ids=IDS)
    return recorder.routes()


def loss_of(model, batch=None):
    return model(input_ids=IDS, labels=IDS).loss


def forward_and_back(model):
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    torch.autograd.grad(loss_of(model), trained, allow_unused=True)


def inside(block, body=forward_and_back):
    def call(model):
        with block(model):
            body(model)

    return call


def watch(model):
    watching = RouterWatch(model)
    watching.start()
    try:
        model(input_ids=IDS)
        watching.read()
    finally:
        watching.stop()


def diagnose(model, certify=0):
    settings = DiagnosisSettings(certify=certify)
    diagnose_layers(collect_records(model, [{"input_ids": IDS}]), settings=settings)


def on_router(function):
    """Call a function of a router and inputs that it saw."""

    def call(model):
        site = router_sites(model)[-1]
        seen = []
        keep = {site.path: site.router}
        with torch.no_grad(), watched(keep, lambda x, *_: seen.append(x.flatten(0, -2)[:6])):
            model(input_ids=IDS)
        function(site.router, seen[0])

    return call


def losses_of_documents(model):
    texts = [row[:9].int() for row in IDS]
    document_losses(model, texts, start=1, windows=Windows(8, 4), vocab_size=64)


def saved(how):
    def call(model):
        with tempfile.TemporaryDirectory() as folder:
            how(model, Path(folder) / "new")

    return call


def pickled(model):
    return pickle.loads(pickle.dumps(model))


def torch_saved(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


# Everything that takes a model and is to change nothing of it.
CALLS = {
    "check": lambda model: check_model(model, {"input_ids": IDS}, balance=0.1),
    "diagnosis": diagnose,
    "diagnosis with certificates": partial(diagnose, certify=1),
    "routing gain": lambda model: measure_routing_gain(model, [{"input_ids": IDS}], loss_of),
    "stability": on_router(perturbation_stability),
    "flips": lambda model: count_flips(model, bf16_copy(model), [{"input_ids": IDS}], run),
    **{f"arithmetic {name}": partial(in_other_arithmetic, name=name) for name in ARITHMETICS},
    "comparison": lambda model: compare_models(model, model, [IDS]),
    "comparison with routes": lambda model: compare_routes(model, ROUTES[0], list(IDS)),
    "reading of routes": lambda model: read_routing(model, IDS, ROUTES[0]),
    "certificates": on_router(certify),
    "certificates of the first": on_router(certify_first),
    "attack": on_router(lambda router, x: find_flip(router, x, starts=1, steps=2)),
    "violations": on_router(lambda r, x: count_violations(r, x, torch.ones(len(x)), tries=2)),
    "decisions": on_router(lambda r, x: holds_within(r, x, torch.ones(len(x)).double())),
    "watch": watch,
    "statistics": lambda model: router_statistics(
        model(input_ids=IDS, output_router_logits=True), model=model
    ),
    "fingerprint": fingerprint_of,
    "sites": lambda model: [f(model) for f in (find_sites, router_sites, routed_layers)],
    "routers": lambda model: (find_routers(model), recognition_note(model)),
    "selection biases": selection_biases,
    "size": model_size,
    "loss": lambda model: token_losses(model, IDS).mean().detach(),
    "loss in chunks": lambda model: token_losses(model, IDS, chunk=5).mean().detach(),
    "losses of documents": losses_of_documents,
    "perplexity": lambda model: perplexity(model, [IDS]),
    "why a loss is not finite": lambda model: explain_loss(
        model, partial(loss_of, model), 1, ALONE
    ),
    "saving": saved(lambda model, out: model.save_pretrained(out)),
    "saving by ours": saved(save_model),
    "refusal to save": save_refusal,
    "export": saved(export_remote_code),
    "export as a program": saved(partial(export_program, form="torch-export")),
    "generation": lambda model: model.generate(IDS, generator=None, **GENERATION),
    "capture": inside(capture),
    "pins": inside(pin_routes),
    "capture of inputs": inside(partial(capture, inputs=True)),
    "record": inside(partial(record, weights=True)),
    "record of a generation": inside(record, lambda model: model.generate(IDS, **GENERATION)),
    "replay": inside(lambda model: replay(model, ROUTES[0])),
    "replay of weights": inside(lambda model: replay(model, ROUTES[0], weights="recorded")),
    "evaluation": inside(evaluating),
    "averaged weights": inside(lambda model: WeightAverage(model, 0.9).applied(model)),
    "whole sequences": inside(reading_whole_sequences),
    "unchanged buffers": inside(unchanged_buffers),
    "kept dtypes": inside(routers_keep_dtype),
    "noted choices": inside(noting, loss_of),
    "copy": copy.deepcopy,
}
# What draws from the random stream on purpose, as the same call of transformers does.
DRAWS = ("generation", "record of a generation")
# torch.export and what it imports add loggers and filters as they go.
TRACES = ("export as a program",)
SLOW = ("diagnosis with certificates", "export as a program", "certificates", "attack")
OURS_ALONE = (
    "export", "flips", "certificates", "certificates of the first", "decisions",
)  # fmt: skip
ROUTES = []


def run(model, batch):
    return model(**batch)


@pytest.fixture(scope="module")
def models():
    """A swapped model and a stock one, as both are after their first forward."""
    found = {"swapped": replace_routers(tiny_model(FAMILIES["mixtral"]), CONFIG)}
    found["stock"] = tiny_model(FAMILIES["deepseek_v3"])
    for model in found.values():
        prepare(model)
    return found


def prepare(model):
    """Modes, gradients and what trains that differ from module to module."""
    # transformers keeps on the instance that it has set up the capture of router logits
    with torch.no_grad():
        model(input_ids=IDS, labels=IDS, output_router_logits=True)
    model.train()
    first = next(part for part in model.modules() if isinstance(part, nn.ModuleList))[0]
    first.eval()
    *_, head = (part for part in model.modules() if isinstance(part, nn.Linear))
    head.requires_grad_(False)
    head.forward = partial(type(head).forward, head)  # as accelerate
    *_, norm = (value for name, value in model.named_parameters() if "norm" in name)
    norm.grad = torch.full_like(norm, 0.25)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)  # which notes its class and dtype in the configuration
    return model


@pytest.fixture
def left(tmp_path, monkeypatch):
    """``left(model, call)``: what a call has changed, by name.

    Files are those below the folder of temporary files and the one it runs in.
    """
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.chdir(tmp_path)

    def compare(model, call, *, draws=False, values=True):
        def whole():
            process = process_state(random_state=not draws)
            return {**state_of(model, values=values), **process, **files_in(tmp_path)}

        before = whole()
        try:
            call(model)
        finally:
            found.append(changes(before, whole()))
        return found[-1]

    found = compare.found = []
    return compare


WARM = set()
CASES = [
    (kind, name, fails)
    for kind in ("swapped", "stock")
    for name in CALLS
    for fails in (0, 1, 2)
    if kind == "swapped" or name not in OURS_ALONE
]


def is_fast(case):
    kind, name, fails = case
    return kind == "swapped" and name not in SLOW and fails < 2


@pytest.mark.usefixtures("coarse", "unchecked")
@pytest.mark.parametrize(("kind", "name", "fails"), few(CASES, is_fast, "every case"))
def test_a_model_and_the_process_are_left_as_they_were(models, left, kind, name, fails):
    """Also where the experts raise in their first call, or in their second."""
    model = models[kind]
    ROUTES[:] = [routes_of(model, weights=True)]
    if name not in WARM:  # what a first call imports may add filters of warnings and loggers
        WARM.add(name)
        CALLS[name](copy.deepcopy(model))
    calls = []

    def stop(*_):
        calls.append(1)
        if fails and len(calls) >= fails:
            raise KeyboardInterrupt

    experts = [part for path, part in model.named_modules() if path.endswith(".experts")]
    hook = experts[-1].register_forward_pre_hook(stop)
    try:
        left(model, CALLS[name], draws=name in DRAWS)
    except KeyboardInterrupt:
        assert fails
    finally:
        hook.remove()
    assert left.found == [{}]


@contextmanager
def watching(model):
    watch = RouterWatch(model)
    watch.start()
    try:
        yield watch
    finally:
        watch.stop()


# Blocks that a caller opens, and may close in any order.
BLOCKS = {
    "capture": capture,
    "capture of inputs": partial(capture, inputs=True),
    "record": record,
    "record of weights": partial(record, weights=True),
    "replay": lambda model: replay(model, ROUTES[0]),
    "replay of weights": lambda model: replay(model, ROUTES[0], weights="recorded"),
    "watch": watching,
    "kept dtypes": routers_keep_dtype,
    "losses for logits": lambda model: _losses_for_logits(model, IDS, 8),
}


PAIRS = [(first, second) for first in BLOCKS for second in BLOCKS]
PAIRS.remove(("losses for logits",) * 2)  # one takes the place of the other's output


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(("first", "second"), few(PAIRS, lambda pair: pair[0] < pair[1], "all"))
def test_two_blocks_end_in_any_order(models, left, first, second):
    model = models["swapped"]
    ROUTES[:] = [routes_of(model, weights=True)]

    def call(model):
        with ExitStack() as other, ExitStack() as one, torch.no_grad():
            one.enter_context(BLOCKS[first](model))
            other.enter_context(BLOCKS[second](model))
            model(input_ids=IDS)
            one.close()
            if not second.startswith("replay"):  # its routes are read
                model(input_ids=IDS)

    assert left(model, call) == {}


def test_the_block_that_is_left_open_goes_on(models):
    model = models["swapped"]
    for later in (record, capture):
        with ExitStack() as other, ExitStack() as one, torch.no_grad():
            early = one.enter_context(record(model))
            late = other.enter_context(later(model))
            model(input_ids=IDS)
            one.close()
            model(input_ids=IDS[:1])
        assert len(early.routes()) == 2
        found = len(late.routes()) if later is record else len(late.indices()) // 2 + 1
        assert found == 3


@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
def test_a_block_that_nobody_closes_ends_with_its_model():
    """As the hooks of router losses do, of a trainer that never trains."""
    model = replace_routers(tiny_model(FAMILIES["mixtral"]), CONFIG)
    opened = [block(model) for block in (capture, record, routers_keep_dtype)]
    for block in opened:
        block.__enter__()
    model.held = opened  # a circle, which only the collector frees
    gone = weakref.ref(model)
    del model, opened, block
    gc.collect()
    assert gone() is None


@pytest.fixture
def fresh():
    """A swapped model whose router logits nobody has asked for: transformers' hooks for those
    are functions that no pickle takes.
    """
    torch.manual_seed(0)
    return replace_routers(tiny_model(FAMILIES["mixtral"]), CONFIG)


COPIES = {"copied": copy.deepcopy, "pickled": pickled, "saved by torch": torch_saved}


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("block", BLOCKS)
def test_a_copy_made_inside_a_block_is_one_made_outside(fresh, block, how):
    """It has none of the block's hooks, calls its own routers, and is not recorded."""
    with torch.no_grad():
        fresh(input_ids=IDS)
    before = state_of(fresh)
    ROUTES[:] = [routes_of(fresh, weights=True)]
    with torch.no_grad():
        logits = fresh(input_ids=IDS).logits
    outside = state_of(COPIES[how](fresh), identities=False)
    with BLOCKS[block](fresh) as opened, torch.no_grad():
        inside = COPIES[how](fresh)
        assert changes(outside, state_of(inside, identities=False)) == {}
        assert torch.equal(inside(input_ids=IDS).logits, logits)
        for router in find_routers(inside).values():
            for parameter in router.parameters():
                parameter.normal_()
        assert not torch.equal(inside(input_ids=IDS).logits, logits)
        seen = fresh(input_ids=IDS)
        if block.startswith(("record", "replay", "capture")):
            assert torch.equal(seen.logits, logits)
        if block.startswith("record"):
            assert len(opened.routes()) == len(IDS)
        if block.startswith("capture"):
            assert len(opened.indices()) == 2
    assert changes(before, state_of(fresh)) == {}


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("block", BLOCKS)
def test_a_folder_saved_inside_a_block_is_one_saved_outside(fresh, block, tmp_path):
    ROUTES[:] = [routes_of(fresh, weights=True)]
    fresh.save_pretrained(tmp_path / "outside")
    with BLOCKS[block](fresh):
        fresh.save_pretrained(tmp_path / "inside")
        with torch.no_grad():
            fresh(input_ids=IDS)
    digests = [
        {str(Path(path).relative_to(folder)): digest for path, digest in files_in(folder).items()}
        for folder in (tmp_path / "outside", tmp_path / "inside")
    ]
    assert digests[0] == digests[1] and len(digests[0]) >= 3


@pytest.mark.usefixtures("unchecked")
def test_an_export_keeps_the_code_that_a_configuration_names(fresh, left):
    """That of a model that was opened from an earlier export."""
    fresh.config.auto_map = {"AutoConfig": "configuration_mine.MineConfig"}
    with tempfile.TemporaryDirectory() as folder:
        fresh.save_pretrained(folder)
    assert left(fresh, CALLS["export"]) == {}


# What changes a model on purpose, and the names of what it may change.
CHANGING = {
    "swap": (lambda model: replace_routers(model, LinearConfig()), r"\.gate|\.mlp: attr|config"),
    "freeze": (freeze_routers, r"^tensor .*\.gate\."),
    "train routers": (train_routers_only, "^tensor "),
    "fit": (
        lambda model: fit_routers(model, [IDS] * 3, report=lambda *_: None), r"^tensor .*\.gate\."
    ),
    "upcycle": (lambda model: upcycle(model, CONFIG, [IDS], [IDS]), r"\.gate|\.mlp: attr|config"),
}  # fmt: skip


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("name", CHANGING)
def test_what_changes_a_model_changes_nothing_else(fresh, left, name):
    model = prepare(fresh)
    call, allowed = CHANGING[name]
    call(copy.deepcopy(model) if name != "fit" else prepare(swap_copy(model)))
    found = left(model, call)
    assert found
    assert [key for key in found if not re.search(allowed, key)] == []
    changed = {key: value for key, value in found.items() if key.startswith("gradient")}
    assert all(value == (None, None) for value in changed.values())


def swap_copy(model):
    """A copy whose routers wait for a fit, as a copy's own do not."""
    return replace_routers(copy.deepcopy(model), CONFIG)


ADDED = {
    "losses": lambda trainer: add_router_losses(trainer, balance=0.1, margin=0.1),
    "statistics": lambda trainer: add_router_statistics(trainer, every=1),
}


@pytest.mark.slow("trainings")
@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("name", ADDED)
def test_a_training_leaves_what_one_without_ours_leaves(fresh, left, tmp_path, name, fails):
    """Also one that ends in an exception in the second step."""
    found = []
    for add in (lambda trainer: None, ADDED[name]):
        model = copy.deepcopy(fresh)
        seen = []

        def stop(*_, seen=seen):
            seen.append(1)
            if fails and len(seen) > 1:
                raise KeyboardInterrupt

        hook = model.lm_head.register_forward_pre_hook(stop)
        options = TrainingArguments(
            output_dir=str(tmp_path / "out"), report_to=[], save_strategy="no", use_cpu=True,
            disable_tqdm=True, max_steps=3, per_device_train_batch_size=2, logging_steps=1,
        )  # fmt: skip
        rows = [{"input_ids": row, "labels": row} for row in IDS]
        trainer = Trainer(model=model, args=options, train_dataset=rows)
        add(trainer)
        try:
            left(model, lambda _, trainer=trainer: trainer.train(), draws=True, values=False)
        except KeyboardInterrupt:
            assert fails
        hook.remove()
        state = {**state_of(model, values=False, identities=False)}
        found.append({k: v for k, v in state.items() if not k.startswith("gradient")})
    assert changes(*found) == {}


IN_EVERY_FAMILY = [
    "check", "diagnosis", "routing gain", "comparison", "arithmetic int8", "watch",
    "loss in chunks", "record", "replay", "replay of weights", "copy",
]  # fmt: skip


NO_TRAINING = "check", "diagnosis", "comparison", "arithmetic int8", "copy"


@pytest.mark.slow("every rule of selection")
@pytest.mark.usefixtures("coarse", "unchecked")
@pytest.mark.parametrize("kind", ["stock", "swapped"])
@pytest.mark.parametrize("family", BY_RULE)
def test_models_of_every_rule_are_left_as_they_were(left, family, kind):
    model = tiny_model(FAMILIES[family])
    if kind == "swapped":
        replace_routers(model, CONFIG)
    prepare(model)
    speaks = model.get_output_embeddings() is not None  # else it labels tokens
    for name in IN_EVERY_FAMILY if speaks else [n for n in IN_EVERY_FAMILY if "chunks" not in n]:
        ROUTES[:] = [routes_of(model, weights=True)]
        CALLS[name](copy.deepcopy(model))
        draws = family == "phimoe" and name not in NO_TRAINING  # it draws experts in training
        assert left(model, CALLS[name], draws=draws) == {}, name
    for block in ("record", "replay", "watch", "kept dtypes"):
        ROUTES[:] = [routes_of(model)]
        outside = state_of(copy.deepcopy(model), identities=False)
        with BLOCKS[block](model), torch.no_grad():
            inside = copy.deepcopy(model)
            model(input_ids=IDS)
        assert changes(outside, state_of(inside, identities=False)) == {}, block

"""Functions of functional/ are pure: the same result again, nothing changed, nothing kept."""

import ast
import inspect
from pathlib import Path

import pytest
import torch

from l2r import functional

T, D, R, N, H, K = 6, 8, 3, 5, 2, 2
ROOT = Path(functional.__file__).parent


def arguments(function):
    """Fresh arguments by the names of the parameters; options keep their defaults."""
    torch.manual_seed(0)
    vector, one = torch.randn(T).abs(), torch.tensor(1.5)
    known = {
        "x": torch.randn(T, D),
        "gain": one if function.__name__.startswith("standard") else torch.randn(D),
        "projection": torch.randn(R, D),
        "query": torch.randn(T, R),
        "anchors": torch.randn(N, H, R),
        "scores": torch.randn(T, N, H),
        "logits": torch.randn(T, N),
        "ranking": torch.randn(T, N),
        "probs": torch.softmax(torch.randn(T, N), dim=1),
        "indices": torch.randint(0, N, (T, K)),
        "vectors": torch.randn(T, R),
        **dict.fromkeys(("rho", "rho_hat", "kappa"), vector),
        **dict.fromkeys(("mean", "variance", "shift"), one),
        "load": torch.rand(N),
        "affinities": torch.softmax(torch.randn(T, N), dim=1),
        "sequences": torch.tensor([0, 0, 0, 1, 1, 1]),
        "mask": torch.tensor([True, False, True, True, True, False]),
        "num_experts": N,
        "top_k": K,
        "gamma": 1.0,
        "beta": 0.5,
        "p": 4.0,
    }
    parameters = inspect.signature(function).parameters.values()
    return {p.name: known[p.name] for p in parameters if p.name in known or p.default is p.empty}


def tensors(result):
    if isinstance(result, int | float):
        return [torch.tensor(result)]
    return [result] if isinstance(result, torch.Tensor) else list(result)


@pytest.mark.parametrize("name", functional.__all__)
def test_a_function_changes_nothing_and_gives_the_same_again(name):
    function = getattr(functional, name)
    given, before = arguments(function), arguments(function)
    assert any(isinstance(value, torch.Tensor) for value in given.values())
    random, mode = torch.get_rng_state(), torch.is_grad_enabled()
    first, second = (tensors(function(**given)) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    for key, value in given.items():
        assert torch.equal(torch.as_tensor(value), torch.as_tensor(before[key])), key
    assert torch.equal(torch.get_rng_state(), random) and torch.is_grad_enabled() is mode


@pytest.mark.parametrize("path", sorted(ROOT.glob("*.py")), ids=lambda path: path.name)
def test_a_file_holds_no_state_no_module_and_no_device(path):
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        assert not isinstance(node, ast.Global | ast.Nonlocal), ast.unparse(node)
        if isinstance(node, ast.ClassDef):  # named numbers are no state
            assert [ast.unparse(base) for base in node.bases] == ["NamedTuple"], ast.unparse(node)
        names = [alias.name for alias in getattr(node, "names", []) if isinstance(alias, ast.alias)]
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        names += [ast.unparse(node)] if isinstance(node, ast.Attribute) else []
        for name in names:
            assert not name.startswith(("torch.nn", "nn.")) and name != "nn", name
            assert name.rpartition(".")[2] not in ("cuda", "device_count", "register_buffer"), name
    for node in tree.body:  # constants only: nothing that a call could fill
        if isinstance(node, ast.Assign | ast.AnnAssign) and ast.unparse(node)[:7] != "__all__":
            mutable = ast.List | ast.Dict | ast.Set | ast.ListComp | ast.DictComp | ast.SetComp
            assert not isinstance(node.value, mutable), ast.unparse(node)

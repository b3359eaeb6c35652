"""Choice of the parameters that train: only the routers, or everything else."""

from torch import nn

from l2r.errors import InputError
from l2r.hf.swap.sites import Site, running_sites


def train_routers_only(model: nn.Module) -> list[str]:
    """Let the routers train and freeze everything else; returns the names of what trains.

    ``model`` has routers of ours, swapped ones, or those of a supported family. A selection bias
    is not trained by gradients and stays frozen.
    Raises ValueError for a model without a supported router, with adapters on its routers, or
    with quantized ones.
    """
    chosen = _router_parameters(model)
    for name, parameter in chosen.items():
        if not parameter.is_floating_point():
            raise InputError(f"routers must have floating weights; {name} is {parameter.dtype}")
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    for parameter in chosen.values():
        parameter.requires_grad_(True)
    return list(chosen)


def freeze_routers(model: nn.Module) -> list[str]:
    """Freeze the routers, and nothing else; returns the names of what is frozen now.

    Raises ValueError for a model without a supported router, or with adapters on its routers.
    """
    frozen = _router_parameters(model)
    for parameter in frozen.values():
        parameter.requires_grad_(False)
    return list(frozen)


def trainable_parameters(site: Site) -> dict[str, nn.Parameter]:
    """Parameters of a router by name, without a selection bias, which no gradient reaches."""
    return {
        name: parameter
        for name, parameter in site.router.named_parameters()
        if name != site.selection.bias
    }


def _router_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    return {
        f"{site.path}.{name}": parameter
        for site in running_sites(model)
        for name, parameter in trainable_parameters(site).items()
    }

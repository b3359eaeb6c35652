"""Parameters that a router keeps on a surface, brought back to it after an optimizer step."""

from torch import nn

from l2r.routers.base import Router


def constrain(model: nn.Module) -> None:
    """Let every Router inside ``model`` restore its constraint; call it after each optimizer step.

    Our training loop, ``add_router_losses`` and joint training of an upcycled model do. It works
    on whole parameters and on those that FSDP2 has sharded, which a forward must not write to.
    """
    for module in model.modules():
        if isinstance(module, Router):
            module.constrain()

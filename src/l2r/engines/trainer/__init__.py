"""Router losses, statistics and replayed routes in transformers' Trainer, TRL and Lightning.

    trainer = Trainer(model=model, args=args, train_dataset=data)
    add_router_losses(trainer, balance=0.01, z=0)  # models with our routers
    add_router_statistics(trainer)  # supported families too
    trainer.train()

Begin at router_losses.py; lightning.py has the hooks for Lightning, route_replay.py those for TRL.
"""

from l2r.engines.trainer.router_log import RouterLog as RouterLog
from l2r.engines.trainer.router_log import add_router_statistics as add_router_statistics
from l2r.engines.trainer.router_losses import RouterLosses as RouterLosses
from l2r.engines.trainer.router_losses import add_router_losses as add_router_losses

"""Router losses, statistics and replayed routes in transformers' Trainer, TRL and Lightning.

    trainer = Trainer(model=model, args=args, train_dataset=data)
    add_router_losses(trainer, balance=0.01)  # models with any routers, stock ones too
    add_bias_balancing(trainer)  # or this, where they have a selection bias
    add_router_statistics(trainer)
    trainer.train()

Begin at router_losses.py; lightning.py has the hooks for Lightning, route_replay.py those for TRL.
"""

from l2r.engines.trainer.bias_callback import BiasCallback as BiasCallback
from l2r.engines.trainer.bias_callback import add_bias_balancing as add_bias_balancing
from l2r.engines.trainer.router_log import RouterLog as RouterLog
from l2r.engines.trainer.router_log import add_router_statistics as add_router_statistics
from l2r.engines.trainer.router_losses import RouterLosses as RouterLosses
from l2r.engines.trainer.router_losses import add_router_losses as add_router_losses

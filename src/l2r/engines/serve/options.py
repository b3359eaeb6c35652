"""How a checkpoint is served, and what may be asked for; read without torch."""

from dataclasses import dataclass, field

from l2r.engines.serve.limits import ServeLimits
from l2r.errors import InputError
from l2r.hf.checkpoints import Placement


@dataclass(frozen=True)
class ServeOptions:
    """The way a checkpoint is served.

    ``name`` is the name of the model in requests, the folder's by default. ``num_blocks`` sizes
    the key-value cache of continuous batching, in blocks of 256 tokens. ``allowed_hosts`` are
    further names under which requests may come. ``trust_remote_code`` as for ``load_pretrained``.
    """

    name: str | None = None
    host: str = "localhost"
    port: int = 8000
    placement: Placement = field(default_factory=Placement)
    continuous_batching: bool = False
    num_blocks: int | None = None
    allowed_hosts: tuple[str, ...] = ()
    trust_remote_code: bool = False
    limits: ServeLimits = field(default_factory=ServeLimits)

    def __post_init__(self) -> None:
        if self.num_blocks is not None and not self.continuous_batching:
            raise InputError(
                f"num_blocks is for continuous batching; got num_blocks={self.num_blocks}"
            )

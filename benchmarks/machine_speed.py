"""Speed of this machine (operations and bytes per second), and steps as CUDA graphs."""

from dataclasses import dataclass

import torch

from l2r_lab.timing import Step, measure

_SIDE = 1024  # of the matrices
_NUMBERS = 2**24  # that are copied, more than caches hold


@dataclass(frozen=True)
class MachineSpeed:
    """Floating-point operations in fp32, and bytes read or written, per second."""

    flops: float
    bytes: float

    def limit(self, flops: float, bytes_: float) -> tuple[float, str]:
        """Least seconds for so much work, and which of the two takes them."""
        seconds = {"multiplications": flops / self.flops, "memory": bytes_ / self.bytes}
        longest = max(seconds, key=lambda name: seconds[name])
        return seconds[longest], longest


def machine_speed(device: str, *, seconds: float = 1.0, clock: str = "wall") -> MachineSpeed:
    """Measure both with torch's threads, by the fastest turn of ``measure``."""
    a, b = (torch.randn(_SIDE, _SIDE, device=device) for _ in range(2))
    x = torch.randn(_NUMBERS, device=device)
    y = torch.empty_like(x)
    steps = {"product": lambda _: a @ b, "copy": lambda _: y.copy_(x)}
    times = measure(steps, seconds=seconds, rounds=7, clock=clock)
    return MachineSpeed(
        2 * _SIDE**3 / min(times["product"].turns), 8 * _NUMBERS / min(times["copy"].turns)
    )


def graphed(step: Step) -> Step:
    """Return the step as a CUDA graph replay: the time on the device alone, without launches."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step(0)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(0)
    return lambda _: graph.replay()

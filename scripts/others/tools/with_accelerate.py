"""accelerate: layers on disk and on the CPU, and two processes."""

from tempfile import TemporaryDirectory

import torch
from accelerate import cpu_offload, disk_offload
from transformers import AutoModelForCausalLM

from l2r.hf.swap.sites import router_sites
from l2r.hf.swap.swap import replace_routers
from scripts.others.tools.rows import Row, row
from scripts.others.tools.subjects import ROUTER, Subject, largest_difference, logits

ROWS: list[Row] = []
CPU = torch.device("cpu")


@row(ROWS, "`cpu_offload`: the same bits")
def on_cpu(subject: Subject) -> None:
    """Every layer in a state dictionary, loaded as it runs."""
    model = cpu_offload(subject.model(), execution_device=CPU, offload_buffers=True)
    assert largest_difference(model, subject.model()) == 0


@row(ROWS, "`disk_offload`: the same bits")
def on_disk(subject: Subject) -> None:
    """Every layer in a file, loaded as it runs."""
    with TemporaryDirectory() as folder:
        model = disk_offload(subject.model(), folder, execution_device=CPU, offload_buffers=True)
        assert largest_difference(model, subject.model()) == 0


@row(ROWS, "`from_pretrained(device_map=...)` with layers on disk: the same bits")
def mapped(subject: Subject) -> None:
    """The last layer on disk, by transformers' own placement."""
    whole = AutoModelForCausalLM.from_pretrained(subject.folder)
    layers = {name for name, _ in whole.model.named_children() if name != "layers"}
    places = {f"model.{name}": "cpu" for name in layers} | {"lm_head": "cpu"}
    places |= {f"model.layers.{n}": "disk" if n else "cpu" for n in range(len(whole.model.layers))}
    with TemporaryDirectory() as folder:
        model = AutoModelForCausalLM.from_pretrained(
            subject.folder, device_map=places, offload_folder=folder
        )
        assert any(p.is_meta for p in model.parameters())
        assert largest_difference(model, whole) == 0


@row(ROWS, '`device_map="auto"` with less memory than the model needs: the same bits')
def too_little(subject: Subject) -> None:
    """As a model larger than the memory is opened."""
    whole = AutoModelForCausalLM.from_pretrained(subject.folder)
    size = sum(p.numel() * p.element_size() for p in whole.parameters())
    with TemporaryDirectory() as folder:
        model = AutoModelForCausalLM.from_pretrained(
            subject.folder, device_map="auto", max_memory={"cpu": size // 2}, offload_folder=folder
        )
        assert any(p.is_meta for p in model.parameters())
        assert largest_difference(model, whole) == 0


@row(ROWS, "routers swapped while the model is offloaded equal those swapped before")
def swapped_offloaded(subject: Subject) -> None:
    """Stock has nothing to swap here; its row is the swap of a stock model."""
    whole = replace_routers(subject.model(), ROUTER)
    model = cpu_offload(subject.model(), execution_device=CPU, offload_buffers=True)
    assert router_sites(replace_routers(model, ROUTER))
    assert torch.equal(logits(model), logits(whole))

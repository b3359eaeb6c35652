"""Our OLMoE inside vLLM: ``pip install l2r-moe`` in vLLM's environment, then ``vllm serve FOLDER``.

vLLM finds ``register`` by its entry point. It chooses experts, splits and quantizes them, and
batches; the logits they are chosen by are our router's. ``--model-impl transformers`` takes
vLLM's Transformers backend instead, which runs the modeling file of an exported folder.
"""

import logging

from l2r.engines.tried import outside_tried

TRIED = ">=0.32,<0.34"


def register() -> None:
    """Make the architecture known to vLLM; outside the tried versions a warning and no more."""
    import vllm

    problem = outside_tried("vllm", vllm.__version__, TRIED)
    if problem:
        logging.getLogger("vllm.plugins.l2r").warning("%s; l2r registers nothing", problem)
        return
    from l2r.hf.models import L2rOlmoeForCausalLM  # its module makes it known to transformers

    name = L2rOlmoeForCausalLM.__name__
    vllm.ModelRegistry.register_model(name, f"{__name__}.olmoe:{name}")

"""Our OLMoE inside vLLM: ``pip install l2r-moe`` in vLLM's environment, then ``vllm serve FOLDER``.

vLLM finds ``register`` by its entry point. It chooses experts, splits and quantizes them, and
batches; the logits they are chosen by are our router's. ``--model-impl transformers`` takes
vLLM's Transformers backend instead, which runs the modeling file of an exported folder.
"""

import logging

from l2r.versions import check_version


def register() -> None:
    """Make the architecture known to vLLM; one that is too old gets a line in its log and no more.

    vLLM calls this in every process, for every model: it raises nothing.
    """
    import vllm

    try:
        check_version("vllm", vllm.__version__)
    except ImportError as error:
        logging.getLogger("vllm.plugins.l2r").warning("%s; l2r registers nothing", error)
        return
    from l2r.hf.models import L2rOlmoeForCausalLM  # its module makes it known to transformers

    name = L2rOlmoeForCausalLM.__name__
    vllm.ModelRegistry.register_model(name, f"{__name__}.olmoe:{name}")

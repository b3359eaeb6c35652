"""Our routers in vLLM: ``pip install l2r-moe`` in its environment, then ``vllm serve FOLDER``.

vLLM finds ``register`` by its entry point. The folder is that of ``l2r swap``, of a run or of
``l2r export``; no code in it is run. vLLM's own class of the family computes everything but the
logits, by which it chooses experts; ``architectures.py`` says which families that are.
"""

import logging

from l2r.versions import check_version

logger = logging.getLogger("vllm.plugins.l2r")


def register() -> None:
    """Make our architectures known to vLLM; one that is too old gets a line in its log and no more.

    vLLM calls this in every process, for every model, and maybe twice: it raises nothing.
    """
    import vllm

    try:
        check_version("vllm", vllm.__version__)
    except ImportError as error:
        logger.warning("%s; l2r registers nothing", error)
        return
    from l2r.engines.vllm.architectures import add_architectures, read_our_configurations

    add_architectures(vllm.ModelRegistry)
    read_our_configurations()

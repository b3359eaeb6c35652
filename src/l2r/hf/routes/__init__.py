"""Routes: which experts every token takes, recorded, kept and replayed."""

from l2r.hf.routes.fingerprint import Fingerprint, tokenizer_digest
from l2r.hf.routes.formats import (
    from_megatron,
    from_sglang,
    from_vllm,
    to_megatron,
    to_sglang,
    to_vllm,
)
from l2r.hf.routes.routes import NO_ROUTE, RouteAgreement, Routes

__all__ = [
    "NO_ROUTE",
    "Fingerprint",
    "RouteAgreement",
    "Routes",
    "from_megatron",
    "from_sglang",
    "from_vllm",
    "to_megatron",
    "to_sglang",
    "to_vllm",
    "tokenizer_digest",
]

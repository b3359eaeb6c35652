"""Routes: which experts every token takes, recorded, kept and replayed.

Imports swap/ and below. Begin at routes.py (what a record is) or replaying.py.
"""

from typing import TYPE_CHECKING

from l2r.imports import lazy_names

if TYPE_CHECKING:
    from l2r.hf.routes.backward_pass import next_number as next_number
    from l2r.hf.routes.backward_pass import outside_of_graphs as outside_of_graphs
    from l2r.hf.routes.backward_pass import running_number as running_number
    from l2r.hf.routes.fingerprint import Fingerprint as Fingerprint
    from l2r.hf.routes.fingerprint import tokenizer_digest as tokenizer_digest
    from l2r.hf.routes.formats import all_layers as all_layers
    from l2r.hf.routes.formats import from_megatron as from_megatron
    from l2r.hf.routes.formats import from_sglang as from_sglang
    from l2r.hf.routes.formats import from_verl as from_verl
    from l2r.hf.routes.formats import from_vllm as from_vllm
    from l2r.hf.routes.formats import to_megatron as to_megatron
    from l2r.hf.routes.formats import to_sglang as to_sglang
    from l2r.hf.routes.formats import to_vllm as to_vllm
    from l2r.hf.routes.formats import vllm_text as vllm_text
    from l2r.hf.routes.layers import fingerprint_of as fingerprint_of
    from l2r.hf.routes.layers import routed_layers as routed_layers
    from l2r.hf.routes.pinning import RoutePins as RoutePins
    from l2r.hf.routes.pinning import pin_routes as pin_routes
    from l2r.hf.routes.recorder import RouterChoices as RouterChoices
    from l2r.hf.routes.recorder import record as record
    from l2r.hf.routes.replaying import replay as replay
    from l2r.hf.routes.routes import NO_ROUTE as NO_ROUTE
    from l2r.hf.routes.routes import RouteAgreement as RouteAgreement
    from l2r.hf.routes.routes import Routes as Routes
    from l2r.hf.routes.routes import Side as Side
    from l2r.hf.routes.routes import check_tokens as check_tokens
    from l2r.kernels.tracing import in_backward as in_backward
    from l2r.routers.observe import unwrapped_model as unwrapped_model
else:
    __getattr__, __dir__ = lazy_names(__name__, "lm")

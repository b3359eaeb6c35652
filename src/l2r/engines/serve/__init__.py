"""An OpenAI-compatible server for one checkpoint: a small app of ours over transformers' models.

Imports hf/ and below. Begin at server.py (the process), web_app.py (the requests) or worker.py.
"""

from typing import TYPE_CHECKING

from l2r.imports import lazy_names

if TYPE_CHECKING:
    from l2r.engines.serve.options import ServeLimits as ServeLimits
    from l2r.engines.serve.options import ServeOptions as ServeOptions
    from l2r.engines.serve.options import check_address as check_address
    from l2r.engines.serve.server import serve_checkpoint as serve_checkpoint
else:
    __getattr__, __dir__ = lazy_names(__name__)

"""Our routers in engines of others: trainers, OLMo-core, Megatron-core, torchtitan, servers.

Imports analysis/ and below. A folder per engine, imported when it is named. Begin at engine.py,
which the plugs share.
"""

"""Cost of routers and of runs: benchmarks (measured) and planning (calculated).

Imports analysis/ and below. Begin at benchmarks/router.py or planning/choose.py.
"""

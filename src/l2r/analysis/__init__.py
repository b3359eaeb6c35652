"""Analysis of routers: diagnostics (metrics, robustness, checks) and certificates (proofs).

Imports training/ and below. Begin at diagnostics/collect.py, which watches routers.
"""

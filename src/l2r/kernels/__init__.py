"""Fused forms of l2r.functional with the same results; routers call l2r.kernels.dispatch only.

Imports functional/ and below. Begin at README.md, then plain.py, which the other forms must equal.
"""

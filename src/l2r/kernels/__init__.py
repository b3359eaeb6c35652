"""Fused forms of l2r.functional with the same results; routers call l2r.kernels.dispatch only."""

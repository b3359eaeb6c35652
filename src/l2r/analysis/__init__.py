"""Watch once, reduce often: diagnostics, certificates."""

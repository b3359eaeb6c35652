"""Commands of the laboratory; l2r/cli/app.py finds them by name."""

"""Diagnostics: what routers do, how robust they are, and what can be proved of it."""

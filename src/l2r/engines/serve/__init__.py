"""An OpenAI-compatible server for one checkpoint: a small app of ours over transformers' models."""

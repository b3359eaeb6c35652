"""Models: OLMoE on transformers, ViT, and router swaps in other model families."""

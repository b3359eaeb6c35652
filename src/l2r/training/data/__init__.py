"""Data: the embedded corpus, token files, the OLMoE mixture, images."""

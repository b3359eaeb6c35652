"""The Triton backend: device functions, kernels and their launches."""

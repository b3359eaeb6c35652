"""The compiled form of the CPU backend: C++ built on first use and called through ctypes."""

from l2r.kernels.native.build import library
from l2r.kernels.native.call import backward, forward

__all__ = ["backward", "forward", "library"]

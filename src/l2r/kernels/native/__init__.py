"""The compiled form of the CPU backend: C++ built on first use and called through ctypes."""

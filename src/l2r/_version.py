"""Version of the package, which every room may import."""

__version__ = "0.5.0"

"""A run is a folder; how its files are laid out, written and read. Imports no torch."""

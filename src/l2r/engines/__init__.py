"""Routers in engines that other people wrote; each engine is imported when it is used."""

"""Certificates: proofs about a router, and the attacks that test them.

Imports routers/ and below. Begin at certify.py (a radius per token) or lipschitz.py (a bound).
"""

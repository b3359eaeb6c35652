"""Certificates: proofs about a router, and the attacks that test them.

Imports routers/ and below, and hf/ for a family's own router. Begin at certify.py (a radius per
token) or lipschitz.py (a bound).
"""

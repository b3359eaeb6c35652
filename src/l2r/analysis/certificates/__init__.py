"""Certificates: proofs about a router, and the attacks that test them."""

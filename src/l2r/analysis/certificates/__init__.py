"""What can be proved of a router, and the attacks that test the proofs."""

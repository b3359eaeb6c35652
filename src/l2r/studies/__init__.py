"""Many runs: which there are, running them, measuring them, judging claims."""

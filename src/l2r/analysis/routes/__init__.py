"""Routes that differ: the same weights in other arithmetic, another checkpoint, another engine."""

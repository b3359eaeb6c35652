"""Stands in for a file of transformers' tests that its source distribution leaves out."""

"""Instances that share in place: the memory that they share, and the chunks resident in it."""

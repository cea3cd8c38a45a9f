"""Instances that share in place: the shared memory, and the chunks resident in it."""

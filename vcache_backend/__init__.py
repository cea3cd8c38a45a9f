"""vcache: a node-wide pool of GPU memory for transformer KV caches."""

__version__ = "0.1.0"

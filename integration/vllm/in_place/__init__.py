"""Sharing in place: publishes chunks of this instance's KV cache, reads other instances' chunks."""

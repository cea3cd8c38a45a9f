"""Sharing in place: publishes chunks of this instance's KV cache, and reads chunks of other
instances'."""

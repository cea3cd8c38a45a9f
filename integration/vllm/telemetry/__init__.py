"""Metrics, KV events and traces."""

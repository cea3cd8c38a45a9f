"""Instances that share in place: what they show, and the chunks resident in them."""

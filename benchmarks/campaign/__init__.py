"""Campaigns that search for wrong bytes, wrong answers and ended engines: see `__main__`."""

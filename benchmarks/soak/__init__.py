"""The soak: engines retrieve, check every byte and store while all that they share is killed,
stopped, damaged and filled up.
"""

"""What is measured, one file a subject. Every figure stands beside its reference, measured in the same run.

Run from a checkout: `python -m benchmarks`. Not part of the installed package.
"""

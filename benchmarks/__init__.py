"""The benchmarks, one module for each subject. Every figure stands beside its reference, measured
in the same run.

Run from a checkout: `python -m benchmarks`. Not part of the installed package.
"""

"""Real vLLM instances in processes of their own, and what `benchmarks/vllm_ttft.py` measures on
them.
"""

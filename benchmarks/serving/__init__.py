"""Two OpenAI servers of vLLM behind a round robin, under load: vLLM alone, with its CPU offload,
with LMCache's server, with vcache.
"""

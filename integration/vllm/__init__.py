"""vcache as a KV connector of vLLM. LMCache's plugin uses `model_spec`, too, to read vLLM's
configuration.
"""

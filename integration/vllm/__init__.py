"""vcache as a KV connector of vLLM. LMCache's plugin uses `model.spec`, too, to read vLLM's
configuration."""

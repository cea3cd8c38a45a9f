"""vcache as a KV connector of vLLM. LMCache's plugin reads vLLM's configuration by `model.spec`."""

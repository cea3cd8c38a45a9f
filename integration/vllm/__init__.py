"""vcache as a KV connector of vLLM. What vLLM's configuration says of an instance (`model_spec`) serves LMCache's plugin too."""

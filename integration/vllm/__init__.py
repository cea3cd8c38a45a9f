"""vcache as a KV connector of vLLM. What vLLM's configuration says of an instance (`facts`) serves the LMCache door too."""

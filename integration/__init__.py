"""The integrations: LMCache's storage plugin and vLLM's connector. Installed as
`vcache_backend.integration`."""

"""vcache as a storage plugin of LMCache: `storage_plugins: [vcache]`, see docs/lmcache.md.

LMCache imports `backend`, the only module here that needs LMCache at once. vLLM's plugin imports
`hooks` once vLLM imports its connector for LMCache."""

"""vcache as a storage plugin of LMCache: `storage_plugins: [vcache]`, see docs/lmcache.md.

LMCache imports `backend`, the only module here that needs LMCache at once. What vLLM's plugin
imports (`patches`) needs neither LMCache nor vLLM."""

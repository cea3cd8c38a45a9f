"""The module in which vLLM finds our connectors: by the names that our plugin registers
(plugin.py), or by `kv_connector_module_path`, which works without the plugin, too."""

from __future__ import annotations

from . import plugin
from .vllm.connector import VCacheConnector
from .vllm.multi import VCacheMultiConnector

plugin.warn_if_left_out()
# MultiConnector finds the class that reads a connector's statistics by the registered name only.
plugin.register_name()

__all__ = ["VCacheConnector", "VCacheMultiConnector"]

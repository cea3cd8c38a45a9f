"""The half of the connector in vLLM's scheduler."""

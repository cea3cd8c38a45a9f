"""The half of the connector in a worker of vLLM."""

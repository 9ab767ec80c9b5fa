"""The ties to vLLM. Importing this package imports no vLLM."""

"""The vLLM engine: start, sampling, weight updates during generation."""

"""vLLM as an engine: start, sampling, weights that land while it serves."""

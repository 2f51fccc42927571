"""Hugging Face causal language models: load, shape, checkpoints."""

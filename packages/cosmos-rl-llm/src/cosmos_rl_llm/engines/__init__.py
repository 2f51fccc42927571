"""Rollout engines: `torch` (of this package) and `vllm` (an extra)."""

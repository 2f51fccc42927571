"""The rollout engine: a queue of requests, denoised in batches."""

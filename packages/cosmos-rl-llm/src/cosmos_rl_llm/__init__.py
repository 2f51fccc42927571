"""Language models: GRPO family and SFT on Cosmos-RL. The domain is `domain.LLM`."""

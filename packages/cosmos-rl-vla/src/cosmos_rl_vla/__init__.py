"""Vision-language-action policies in simulators on Cosmos-RL. The domain is `domain.VLA`."""

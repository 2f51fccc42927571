"""World foundation models through diffusers on Cosmos-RL. The domain is `domain.WFM`."""

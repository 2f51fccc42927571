"""The endpoint of a rollout replica, which agents written for OpenAI's interfaces ask for the policy's answers."""

"""Pictures and videos of prompts: read, cut into patches, and given places among the tokens."""

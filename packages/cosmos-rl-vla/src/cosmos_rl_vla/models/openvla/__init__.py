"""OpenVLA and OpenVLA-OFT: vision towers, projector, action tokens, checkpoints."""

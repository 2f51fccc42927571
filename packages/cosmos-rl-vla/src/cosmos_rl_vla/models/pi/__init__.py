"""pi0 and pi0.5: a PaliGemma backbone, an action expert, checkpoints of lerobot and openpi."""

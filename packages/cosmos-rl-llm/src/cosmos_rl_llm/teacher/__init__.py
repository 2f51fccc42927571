"""Learning from a teacher: the frozen model, its outputs, and divergences over the vocabulary. May import policy/."""

"""Episodes of several turns: an environment and a model that speak in turns, recorded as ordinary rollouts."""

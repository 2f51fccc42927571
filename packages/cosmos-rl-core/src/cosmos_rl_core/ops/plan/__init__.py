"""`cosmos-rl plan`."""

"""`cosmos-rl migrate`: a recipe of NVIDIA's Cosmos-RL as a recipe of this project."""

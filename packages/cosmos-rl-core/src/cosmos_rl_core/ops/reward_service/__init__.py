"""`cosmos-rl reward-server`: an HTTP application in front of worker processes."""

"""The command `cosmos-rl`. A command imports what it needs when it runs."""

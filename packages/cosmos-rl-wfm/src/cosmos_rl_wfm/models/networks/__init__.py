"""The families of networks: their calls, and their tiny configurations."""

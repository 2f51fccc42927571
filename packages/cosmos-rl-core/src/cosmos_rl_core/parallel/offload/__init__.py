"""Tensors of a GPU that wait in the host's memory: activations for the backward pass, a role between its turns."""

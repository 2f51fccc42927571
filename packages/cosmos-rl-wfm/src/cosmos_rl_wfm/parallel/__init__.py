"""How a diffusers transformer is spread over the ranks of a policy replica. `axes` and `shape` need no torch."""

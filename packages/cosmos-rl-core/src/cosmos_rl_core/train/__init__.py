"""One step of a policy replica: batch, forward and backward, optimizer, held-out loss.

Used by `workers.policy` through `loop`. Knows neither the algorithm nor the domain.
"""

"""One step of a policy replica: batch, forward and backward, optimizer, held-out loss.

Used by `workers.policy` through `loop`. Depends neither on the algorithm nor on the domain.
"""

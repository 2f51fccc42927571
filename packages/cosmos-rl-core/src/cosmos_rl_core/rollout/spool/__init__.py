"""Large rollouts stay with the replica that made them; the policy maps or pulls them (store, server, reader)."""

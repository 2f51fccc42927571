"""Storage of large groups at the replica that generated them; the policy maps or pulls the files."""

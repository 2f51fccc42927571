"""The trainer's side: live reads, fences, sessions of subscribers."""

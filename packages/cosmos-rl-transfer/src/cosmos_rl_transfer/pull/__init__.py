"""The rollout's side: fetch, prove, land, switch in two phases."""

"""The rollout engine: the policy plays episodes in a pool of simulators."""

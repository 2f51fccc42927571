"""Stand-ins that all packages' tests share: a pretend GPU, several ranks in processes or in one, a paused pass."""

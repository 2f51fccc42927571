"""The order of rows (a run's prompts, supervised rows mixed into its steps), and frames read from video files.

Used by `assemble`, the controller, the policy worker and the domains' readers of data.
"""

"""The order of rows: the prompts of a run, and the supervised rows mixed into its steps.

Used by `assemble`, the controller and the policy worker.
"""

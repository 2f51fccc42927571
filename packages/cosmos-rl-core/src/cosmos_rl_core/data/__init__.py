"""The order of rows (a run's prompts, supervised rows mixed into its steps), and parts of a domain's reader of data.

A reader's parts: frames of video files, a cache bounded in bytes, the count of rows that cannot be read. Used by
`assemble`, the controller, the policy worker and the domains.
"""

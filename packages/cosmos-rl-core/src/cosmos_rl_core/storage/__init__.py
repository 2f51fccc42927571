"""Files: local folders, S3 and other object stores, JSON of users, pickles that are read without being executed.

Used by `checkpoint` and by the readers of the domains.
"""

"""Files: local folders, S3 and other object stores, JSON of users, pickles of arrays, read in a child process.

Used by `checkpoint` and by the readers of the domains.
"""

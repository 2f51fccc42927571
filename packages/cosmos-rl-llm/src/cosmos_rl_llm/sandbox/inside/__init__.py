"""The programs of the sandbox's own interpreter, which has the standard library alone, so that they import relatively.

server --fork--> watcher (server.py) --protection.py, seccomp.py--> the program | the tests (remote.py)
"""

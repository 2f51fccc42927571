"""Diagnoses of a machine and of a run: `cosmos-rl doctor`.

    report     lines with a level and a remedy       machine    all checks of this machine
    software   Python, packages, torch, GPUs         limits     processors, memory, files, disk
    network    addresses, ports, names, RDMA         collective all-reduce between two processes

Packages add checks of their own by the entry point group `cosmos_rl.doctors`: functions that return lines.
"""

"""Diagnoses of a machine and of a run: `cosmos-rl doctor`.

    report     lines with a level and a remedy       machine    all checks of this machine
    software   Python, packages, torch, GPUs         limits     processors, memory, files, disk
    network    addresses, ports, names, RDMA         collective all-reduce between two processes

    run        the diagnosis of a run                waits      who waits for whom, from its status
    activity   open spans of its processes           verdict    the process that all wait for, and the key to change
    symptoms   errors, rewards, weights, timeouts    stacks     its processes on this machine, and their threads

Packages add checks of the machine by the entry point group `cosmos_rl.doctors`: functions that return lines. A run is
diagnosed from its files; nothing here is imported by it.
"""

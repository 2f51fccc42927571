"""Shared memory, TCP, NIXL and torch.distributed behind one protocol."""

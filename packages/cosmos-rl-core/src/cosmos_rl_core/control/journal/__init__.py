"""Append-only log of the ledger's records: segments with CRC, snapshots, group commit."""

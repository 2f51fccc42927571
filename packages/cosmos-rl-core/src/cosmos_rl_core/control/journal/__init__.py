"""The append-only file of the ledger's records: segments with CRC, snapshots, group commit."""

"""The bytes of a tensor: buckets, hashes, deltas."""

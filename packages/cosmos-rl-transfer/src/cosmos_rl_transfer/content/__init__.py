"""The bytes of a bucket: packed, hashed, encoded."""

"""Clips and captions: folders, shards, S3, mock; decoding and caches."""

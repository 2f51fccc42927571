"""The torch engine: continuous batching over packed caches, with the policy's own layers."""

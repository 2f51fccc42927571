"""FSDP and context parallelism of diffusers' transformers."""

"""One file for each way to cut a model over ranks: FSDP, tensor, context and expert parallelism, tied tensors."""

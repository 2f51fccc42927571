"""What tests and benchmarks of a transport, a plan or a sync need."""

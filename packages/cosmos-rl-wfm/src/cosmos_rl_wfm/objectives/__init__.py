"""FlowGRPO, DDRL, DiffusionNFT as rows of the algorithm table."""

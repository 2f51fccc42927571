"""`python -m cosmos_rl_transfer`."""

from cosmos_rl_transfer.cli import main

if __name__ == "__main__":
    main()

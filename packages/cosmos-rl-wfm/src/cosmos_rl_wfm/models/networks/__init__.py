"""The families of networks: what each takes, and its tiny form."""

"""Robot policies: shared parts (flow, noise, values), `pi` and `openvla`."""

"""The conformance suite of transports."""

"""`cosmos-rl serve-policy`: a robot policy behind openpi's websocket protocol and lerobot's gRPC service."""

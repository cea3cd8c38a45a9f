"""The protocol, and its client: messages, sockets, calls. No torch, no CUDA."""

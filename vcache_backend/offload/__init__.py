"""The storage offload tier: chunks that left VRAM, or never fitted, and the way to other nodes."""

"""The storage offload tier: chunks that left VRAM, or never fitted, shared between nodes."""

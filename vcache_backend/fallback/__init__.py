"""The storage tier below the pool: chunks that left VRAM, or never fitted, and the way to other nodes."""

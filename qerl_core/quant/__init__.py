"""NVFP4 weights: the codec, the frozen linear layer over packed weights, and checkpoints on disk."""

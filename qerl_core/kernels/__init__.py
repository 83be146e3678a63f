"""Fast paths. Each file opens with `reference`, the definition in plain PyTorch that its kernel must equal."""

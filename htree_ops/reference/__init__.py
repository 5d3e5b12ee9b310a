"""Plain PyTorch references: slow, obvious, float64-capable, independent of every kernel."""

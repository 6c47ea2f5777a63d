"""PyTorch: steps of its programs, and windows of its profiler."""

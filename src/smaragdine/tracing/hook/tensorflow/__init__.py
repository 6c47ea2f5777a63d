"""TensorFlow: steps of its sessions, and windows of its profiler, Keras 3 on it included."""

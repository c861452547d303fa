"""Models and training steps that are replayed from CUDA graphs."""

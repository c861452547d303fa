"""Runs a schedule: by the interpreter, by compiled code on the CPU or CUDA, or by one existing op."""

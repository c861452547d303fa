"""The commands of ``python -m edgeless``, which measure edgeless and show what it does.

Tools import the runtime, that is all other modules of edgeless; the runtime imports no tool.
"""

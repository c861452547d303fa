"""The commands of ``python -m edgeless``, which measure edgeless and show what it does.

Tools import the runtime, which is every other module of edgeless; the runtime imports no tool.
"""

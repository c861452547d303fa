"""Code that the commands of ``python -m edgeless`` share: tables, progress, memory measurement, child processes."""

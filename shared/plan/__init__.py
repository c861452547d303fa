"""Plans a call before it runs: its passes, their kernels and files, bytes, and time at the roofline."""

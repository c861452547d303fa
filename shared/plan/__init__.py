"""What a call will do before it runs: its passes, their kernels and files, bytes, and time at the roofline."""

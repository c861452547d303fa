"""From the items of a walk to a text in CUDA. Nothing here runs or compiles the text, or knows a GPU."""

"""From the items of a walk to a text in C, by loops over scalars. Nothing here runs or compiles the text."""

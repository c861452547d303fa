"""Files that are written whole or not at all, read with care, and shared by processes."""

"""What all drop-in layers share, whichever framework they are of: the choice, its record, and the swap of models."""

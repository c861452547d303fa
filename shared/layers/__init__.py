"""Code of all drop-in layers, whatever their framework: the choice of a forward, its record, and the swap of models."""

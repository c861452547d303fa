"""Programs: any message function without an edge tensor (see docs/design.md)."""

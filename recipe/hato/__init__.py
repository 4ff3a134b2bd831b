"""HATO: a searched tree of reasoning steps for each problem. Its code is in the overlay, of parts."""

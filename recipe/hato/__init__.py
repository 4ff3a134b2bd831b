"""HATO: a searched tree of reasoning steps for each problem. Its code consists of parts in the package `verl`."""

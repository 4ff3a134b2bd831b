"""The parts of an evaluation that need no server: benchmarks' files, metrics with intervals, judging by a model."""

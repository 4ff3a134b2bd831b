"""Evaluates models on benchmarks: reads the files, asks a server, scores the answers, and measures with intervals."""

"""Experiments about learning and simulations; benchmarks/ measures speed."""

from pathlib import Path

RESULTS = Path(__file__).resolve().parent / "results"

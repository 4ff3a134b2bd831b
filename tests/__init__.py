"""Tests of the package, and suites that other packages can run for their parts (tests/conformance)."""

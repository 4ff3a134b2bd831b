"""HAPO (arXiv 2509.16591): temperature, advantages and clipping that follow the entropy of each token."""

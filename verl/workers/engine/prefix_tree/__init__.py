"""Training on a prefix tree: every token that sequences share goes through the model once.

trie.py        the trie of a micro-batch's sequences
attention.py   attention on it, for models of transformers
log_probs.py   log-probabilities and entropies from its logits; `tree_log_probs` for tests and notebooks
"""

from verl.workers.engine.prefix_tree.log_probs import tree_log_probs

__all__ = ["tree_log_probs"]

"""Training on a prefix tree, where a prefix that sequences share goes through the model only once.

trie.py           the trie of a micro-batch's sequences
attention.py      attention on a trie, for models of transformers
log_probs.py      log-probabilities and entropies from a trie's logits; `tree_log_probs` for tests and notebooks
micro_batches.py  micro-batches of rows that share prefixes
"""

from verl.workers.engine.prefix_tree.log_probs import tree_log_probs

__all__ = ["tree_log_probs"]

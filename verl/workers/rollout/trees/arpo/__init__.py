"""Tool-using agents that branch where they are unsure (ARPO, AEPO): see growth.py."""

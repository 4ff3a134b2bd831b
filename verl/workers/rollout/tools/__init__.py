"""Tools that a policy calls in its rollouts: see base_tool.py."""

"""Tools that a policy calls in its rollouts; base_tool.py defines what a tool is."""

"""HATO: trees of reasoning steps that are searched by value and uncertainty. README.md says what lies where."""

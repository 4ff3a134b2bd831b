"""The recipes: each one holds a method's configs and scripts."""

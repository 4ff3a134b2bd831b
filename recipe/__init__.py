"""The recipes: each one a method as a user sees it."""

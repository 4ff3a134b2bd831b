"""Trainer components of methods; each module here registers its components."""

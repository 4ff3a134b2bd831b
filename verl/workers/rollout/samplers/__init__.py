"""Ways to draw tokens; a module here registers a choice of `sampler=<name>`."""

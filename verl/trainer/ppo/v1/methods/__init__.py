"""What methods do in a training step beside upstream's; a module here registers a trainer component."""

"""What every recipe shares: hardware profiles, a tiny model, a task to learn."""

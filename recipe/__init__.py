"""Methods, each with its parts, configs and scripts in a folder; tasks; and what all of them share."""

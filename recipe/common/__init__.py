"""The code and config that all recipes share: hardware profiles, small models, reports."""

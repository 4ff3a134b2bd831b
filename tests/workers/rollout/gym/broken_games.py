"""A module of environments that raises something else than ImportError."""

import os

HOME = os.environ["GAME_HOME"]

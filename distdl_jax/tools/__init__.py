"""Tools that read networks and jobs; the library does not import them at import time."""

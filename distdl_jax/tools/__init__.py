"""Tools that read networks and jobs: nothing of the library imports them when it is imported."""

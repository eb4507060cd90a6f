"""The communication of the workers' programs: read, compared, explained and drawn, without running anything."""

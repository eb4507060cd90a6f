"""What the workers' programs communicate: read, compared, explained and drawn, without running anything."""

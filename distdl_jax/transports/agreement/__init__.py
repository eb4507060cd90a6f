"""What workers agree on while they trace a program: shapes, dtypes, choices; where one raises, all raise."""

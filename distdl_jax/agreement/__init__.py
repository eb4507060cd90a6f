"""What workers agree on while they trace a program: shapes, dtypes, parameters; where one raises, all raise."""

"""How hangs are found, before programs run and while they do; and how processes are started and ended."""

"""What the import does to the process, what launchers tell it, and programs that are run from their first line on."""

"""The watchdog: no job stands still, or ends, in silence."""

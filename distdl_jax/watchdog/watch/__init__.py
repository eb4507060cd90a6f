"""The watchdog: no job hangs, or ends, in silence.

A *reporter* in every worker tells what its program does; worker 0's *coordinator* decides whether the workers can go
on. Nothing here imports a back-end: messages travel through what the world gives the reporter.
"""

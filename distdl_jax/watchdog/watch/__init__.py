"""The watchdog: no job hangs, or ends, without a message.

A *reporter* in every worker reports the state of its program; worker 0's *coordinator* decides whether the workers can
continue. Nothing here imports a back-end: messages are sent by means of the world that has the reporter.
"""

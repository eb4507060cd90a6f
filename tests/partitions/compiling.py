"""Hears of what is compiled."""

from collections.abc import Iterator
from contextlib import contextmanager

import jax


@contextmanager
def compiled() -> Iterator[list[str]]:
    """Add the name of each function that is compiled inside."""
    names: list[str] = []

    def listen(event: str, duration: float, **about: object) -> None:
        if event.endswith("backend_compile_duration"):
            names.append(str(about.get("fun_name")))

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield names
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)

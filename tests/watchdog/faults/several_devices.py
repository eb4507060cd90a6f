"""A process with several JAX devices.

when: long
workers: 2
environment: XLA_FLAGS=--xla_force_host_platform_device_count=2
says: This process has 2 JAX devices
"""

from parts import dj, on_root, spread

dj.jit(lambda x: spread(x))(on_root(4, 6))

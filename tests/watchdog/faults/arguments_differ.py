"""A plain argument of a function is another one on one worker.

workers: 2
says: The workers' programs differ: `ddof` of var is 0 on worker 0, but 1 on worker 1
"""

from parts import P, dj, jnp, rank

dj.functional.var(jnp.arange(2.0) + rank, P.grid([2]), ddof=rank)

"""The mask of an optimiser looks at the dimensions of arrays, of which placeholders have one.

workers: 2
when: long
says: is masked on worker 1, but not on worker 0
says: jax.tree.map(lambda spec: len(spec.global_shape) > 1, specs)
"""

import optax
from parts import dj, jax

P = dj.Partition()
linear = dj.nn.DistributedLinear(P.create_partition_inclusive([0]).grid([1, 1]), in_features=3, out_features=3)
mask = lambda params: jax.tree.map(lambda param: param.ndim > 1, params)  # noqa: E731
dj.jit(optax.masked(optax.adam(0.1), mask).init)(linear.init(jax.random.key(0)))

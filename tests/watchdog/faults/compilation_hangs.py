"""One worker's compiler hangs: a function in the place, and with the name, of JAX's own never returns.

workers: 2
timeout: 1
when: long
says: distdl_jax: worker 1 has compiled for
says: Worker 1 compiles (compilation_hangs.py:
"""

import jax
from parts import P_all, dj, jnp, rank

from distdl_jax.functional import all_sum_reduce

total = dj.jit(lambda x: all_sum_reduce(x, P_all, axes_keep=()))
if rank == 1:
    compiler = jax.__path__[0] + "/_src/compiler.py"
    names = {}
    exec(compile("def hangs():\n    import time\n    while True: time.sleep(1)", compiler, "exec"), names)
    jax._src.compiler.backend_compile_and_load = lambda *args, **kwargs: names["hangs"]()
print(total(jnp.ones(3)))

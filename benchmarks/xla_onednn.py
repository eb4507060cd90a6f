"""What is wrong with XLA's own oneDNN on CPUs, and why the library asks for a part of it alone, and not everywhere.

python benchmarks/xla_onednn.py

Each line says what was found with the installed jaxlib. `distdl_jax/compiler_options.py` asks for oneDNN's
convolutions, without its softmax, and not where JAX keeps compiled programs.
"""

import subprocess
import sys
import tempfile
import warnings

import jax
import jax.numpy as jnp
import numpy as np
from distdl_jax.compiler_options import ONEDNN, OPTIONS
from jax import lax

x = jnp.zeros((4, 8)).at[1, 3].set(jnp.nan)
found = {name: jax.jit(jax.nn.softmax, compiler_options=asked)(x) for name, asked in {
    "not asked": {}, "asked": {ONEDNN: True}, "asked, without its softmax": dict(OPTIONS)}.items()}  # fmt: skip
for name, y in found.items():
    print(f"softmax of a row with one NaN, {name}: {int(np.isnan(y[1]).sum())} of 8 are NaN")

with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    jax.config.update("jax_compilation_cache_dir", folder)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    volume, kernel = jnp.ones((1, 4, 8, 8, 8)), jnp.ones((4, 4, 3, 3, 3))
    jax.jit(lambda a, b: lax.conv_general_dilated(a, b, (1,) * 3, "SAME"), compiler_options={ONEDNN: True})(
        volume, kernel
    )
    said = [str(each.message) for each in caught if "compilation cache" in str(each.message)]
    print(f"a program that calls oneDNN, in the compilation cache: {said or 'kept'}")

SMALL = """
import jax, jax.numpy as jnp
from jax import lax
x, kernel = jnp.ones((5, 16, 8, 9, 1)), jnp.ones((8, 16, 2, 3, 3))
convolution = lambda x: lax.conv_general_dilated(x, kernel, (2, 2, 2), ((1, 2), (0, 1), (0, 4)))
y, pullback = jax.vjp(convolution, x)
jax.jit(pullback)(y)
"""
status = subprocess.run([sys.executable, "-c", SMALL], capture_output=True, check=False).returncode
print(f"the input's gradient of a small convolution with stride 2, in three dimensions, not asked: status {status}")

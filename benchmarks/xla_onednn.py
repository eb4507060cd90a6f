"""Why the library doesn't ask XLA for its own oneDNN on CPUs, which is up to 30 times faster for convolutions.

python benchmarks/xla_onednn.py

Each line says what was found with the installed jaxlib.
"""

import subprocess
import sys
import tempfile
import warnings

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

ONEDNN = "xla_cpu_experimental_onednn_custom_call"


def nans(function, *args):
    """Return how many results are NaN, as XLA is and with its oneDNN."""
    return [int(np.isnan(jax.jit(function, compiler_options=options)(*args)).sum()) for options in ({}, {ONEDNN: True})]


x = jnp.zeros((4, 8)).at[1, 3].set(jnp.nan)
print("softmax of a row with one NaN: {} NaN, with oneDNN {}".format(*nans(jax.nn.softmax, x)))
image, kernel = jnp.ones((1, 4, 8, 8)).at[0, 0, 4].set(jnp.nan), jnp.ones((4, 4, 3, 3))
activated = nans(lambda x, w: jax.nn.relu(lax.conv_general_dilated(x, w, (1, 1), "SAME") + 1), image, kernel)
print("relu of a convolution: {} NaN, with oneDNN {}".format(*activated))

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

"""Two workers that share one GPU: what they compute is what CPUs compute. Ten faults are in `watchdog/test_faults.py`.

`DISTDL_JAX_TEST_GPU=1 python -m pytest -m gpu`, where JAX has a GPU.
"""

import pytest
from jobs import ON_GPU, run
from test_cuda_programs import FOLDERS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.limit(600),
    pytest.mark.skipif(not ON_GPU, reason="needs an NVIDIA GPU, and DISTDL_JAX_TEST_GPU=1"),
]
SETTINGS = {"JAX_PLATFORMS": "cuda,cpu", "PYTHONPATH": FOLDERS}

CHECKED = """
import jax, jax.numpy as jnp
import distdl_jax as dj

P = dj.Partition()
assert jax.default_backend() == "gpu" and jax.local_device_count() == 1
conv = dj.nn.DistributedConv2d(P.grid([1, 1, 2, 1]), in_channels=2, out_channels=3, kernel_size=3, padding=1)
params = conv.init(jax.random.key(0), jnp.float32)
step = dj.jit(dj.value_and_grad(lambda params, x: (conv(params, x) ** 2).sum()))
print("finite", bool(jnp.isfinite(step(params, jnp.ones((2, 2, 4, 8), "float32"))[0])), flush=True)
try:
    dj.jit(lambda x: dj.functional.halo_exchange(x, P.grid([2]), ((1 + P.rank, 1),)))(jnp.ones(4, "float32"))
except dj.PlanError:
    print("refused", flush=True)
"""


@pytest.mark.parametrize("kind", ["primitives", "networks", "layers"])
def test_a_gpu_computes_what_cpus_do(kind: str) -> None:
    status, output = run(2, "-m", "distdl_jax", "tests/gpu/on_gpu.py", kind, settings=SETTINGS, limit=500, anew=True)
    assert status == 0 and "WRONG" not in output, output
    assert f"{kind} on " in output and "cpu" not in output.split(f"{kind} on ")[1].split(":")[0].lower(), output


def test_programs_and_plans_are_compared_on_gpus() -> None:
    """dj.jit compares the two workers' programs before they run, and refuses plans that differ."""
    status, output = run(2, "-m", "distdl_jax", "-c", CHECKED, limit=200, anew=True)
    assert status == 0, output
    assert output.count("finite True") == output.count("refused") == 2, output

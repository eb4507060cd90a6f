"""What a program of all that opens files leaves open at its end: nothing that Python warns of."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from jobs import ROOT, patience, run

OPENS = """
import sys
from pathlib import Path
import jax
import jax.numpy as jnp
import numpy as np
import distdl_jax as dj

P, folder = dj.Partition(), sys.argv[1]
x = np.arange(24, dtype="float32").reshape(6, 4)
if P.rank == 0:
    np.save(f"{folder}/x.npy", x)
    np.savez(f"{folder}/x.npz", x)
    np.savez_compressed(f"{folder}/compressed.npz", x)
    try:
        import h5py
        with h5py.File(f"{folder}/x.h5", "w") as file:
            file["x"] = x
        import zarr
        zarr.save_array(f"{folder}/x.zarr", x)
    except ImportError:
        pass
spec = dj.TensorSpec(x.shape, P.grid([1, P.size]))
rows = dj.TensorSpec((4,), P.grid([P.size]))
tree, specs = {"x": spec.block(jnp.asarray(x))}, {"x": spec}
dj.checkpoint.export(f"{folder}/x.safetensors", tree, specs)
kept = []
for path in sorted(Path(folder).glob("x.*")) + [Path(folder) / "compressed.npz"]:
    kept.append(dj.data.open_array(path))
    dj.data.read(path, spec.box)
    whole, begun = (dj.data.batches(path, rows, batch_size=2, key=jax.random.key(0), epochs=2) for _ in range(2))
    list(whole)
    next(iter(begun))
    kept.append(begun)
dj.checkpoint.import_(f"{folder}/x.safetensors", specs)
for name in ("manager", "open manager"):
    manager = dj.checkpoint.Manager(f"{folder}/{name}")
    manager.save(tree, specs, 1)
    manager.restore(specs)
    manager.save(tree, specs, 2)
    if name == "manager":
        manager.close()
dj.jit(lambda x: dj.all_reduce(x, P, "sum"))(jnp.ones(3))
print("done")
"""


@pytest.mark.parametrize("how", ["mpi", "simulated"])
def test_no_file_is_left_open(how: str, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(OPENS)
    program = (
        "-m",
        "distdl_jax",
        *(["--simulate", "2"] if how == "simulated" else []),
        tmp_path / "program.py",
        tmp_path,
    )
    settings = {"PYTHONDEVMODE": "1", "PYTHONWARNINGS": "error::ResourceWarning"}
    if how == "mpi":
        status, output = run(2, *program, settings=settings, anew=True)
    else:
        environment = os.environ | settings | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
        command = [sys.executable, *map(str, program)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=patience(120), env=environment)
        status, output = done.returncode, done.stdout + done.stderr
    assert status == 0 and output.count("done") == 2, output
    assert "ResourceWarning" not in output and "Exception ignored" not in output, output

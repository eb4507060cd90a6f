"""A grid that leaves workers without anything to do: one line says so, and none where it is meant."""

import jax.numpy as jnp
import pytest

import distdl_jax as dj
from distdl_jax.partitions import idle_workers

LINES = {
    "two of four": (lambda P: P.grid([1, 2]), "workers 2, 3 of 4 have nothing to do"),
    "three of four": (lambda P: P.grid([3]), "worker 3 of 4 has nothing to do"),
    "all": (lambda P: P.grid([2, 2]), None),
    "one, where a tensor is whole": (lambda P: P.grid([1, 1]), None),
    "chosen by their ranks": (lambda P: P.grid([2], ranks=[0, 2]), None),
    "two beside all": (lambda P: (P.grid([4]), P.grid([2]))[1], None),
    "two beside the two others": (lambda P: (P.grid([2], ranks=[2, 3]), P.grid([2]))[1], None),
}


@pytest.mark.parametrize("case", LINES)
def test_a_line_says_who_is_idle(case, monkeypatch, caplog):
    monkeypatch.setattr(idle_workers, "_said", False)
    make, words = LINES[case]

    def program():
        P = dj.Partition()
        P_x = make(P)
        for _ in range(2):  # said once
            dj.functional.all_sum_reduce(jnp.ones(2) if P_x.active else dj.zero_volume_tensor(), P_x, axes_keep=())
        return P.rank

    assert dj.simulate(4, program) == [0, 1, 2, 3]
    said = [record.getMessage() for record in caplog.records if "nothing to do" in record.getMessage()]
    assert len(said) == (words is not None)
    if words is not None:
        assert words in said[0] and "test_idle_workers.py" in said[0]

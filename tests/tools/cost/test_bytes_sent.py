"""The bytes of `dj.cost` are the bytes that a training step sends: drawn networks run, and each send is counted."""

from collections import defaultdict
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from drawn import drawn

import distdl_jax as dj
from distdl_jax.transports.threads.world import ThreadTransport


@pytest.mark.parametrize("seed", range(100, 108))
def test_a_step_of_a_drawn_network_sends_what_its_cost_says(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """On each of 2 to 8 workers, in messages and in collective operations."""
    build, size = drawn(seed)
    sent: defaultdict[int, list[int]] = defaultdict(list)
    perform = ThreadTransport.perform

    def counted(self: Any, operation: Any, given: np.ndarray, coming: Any) -> np.ndarray:
        nothing = operation.is_message and operation.dest is None
        nbytes = given.nbytes if operation.is_message else operation.bytes_sent
        sent[self._rank].append(0 if nothing else nbytes)
        return perform(self, operation, given, coming)

    def step() -> None:
        network, spec = build(dj.Partition())
        params = network.init(jax.random.key(0), jnp.float32)
        dtype = np.dtype(np.int32 if network.takes_indices else np.float32)
        x = np.zeros(spec.local_shape, dtype) if spec.box else dj.zero_volume_tensor(spec.global_shape[0], dtype=dtype)
        options = {"key": jax.random.key(0)} if network.draws else {}
        value_and_grad = dj.value_and_grad(lambda params, x: jnp.sum(network(params, x, **options) ** 2))
        jax.block_until_ready(jax.jit(value_and_grad)(params, x))

    monkeypatch.setattr(ThreadTransport, "perform", counted)
    dj.simulate(size, step)
    cost = dj.cost(*build(dj.planning_world(size)))
    assert [sum(sent[worker][:-1]) for worker in range(size)] == list(cost.bytes)  # last, the loss is summed

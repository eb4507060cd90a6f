"""Networks written without the library: the loss and its gradients, inside and outside, on uneven blocks."""

from __future__ import annotations

from collections.abc import Iterator

import jax
import pytest
from distribute import own_networks  # noqa: F401  it registers networks
from distribute.beside_one_process import NETWORKS, problem


@pytest.fixture(autouse=True)
def compiled_quickly() -> Iterator[None]:
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.mark.parametrize("name", ["messages_on_a_graph", "swin", "decoder"])
def test_a_network(name: str) -> None:
    with jax.enable_x64(True):
        net = NETWORKS[name]()
        assert problem(net, net.grids[0], steps=0) is None

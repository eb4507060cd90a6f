"""The networks of docs/from-jax.md are hardly longer for any partition than in plain JAX for one worker."""

import ast

import pytest
from jobs import ROOT
from test_docs import blocks

FUNCTIONS = {
    node.name: node
    for node in ast.parse("\n".join(blocks(ROOT / "docs" / "from-jax.md", "python"))).body
    if isinstance(node, ast.FunctionDef)
}


def lines(name: str) -> int:
    """Return the lines of code of a function of the page, and of those that it calls, of each once."""
    found, calls = set[str](), [name]
    while calls:
        found.add(calls[-1])
        names = {node.id for node in ast.walk(FUNCTIONS[calls.pop()]) if isinstance(node, ast.Name)}
        calls += (names & FUNCTIONS.keys()) - found
    return sum(1 + (FUNCTIONS[each].end_lineno or 0) - FUNCTIONS[each].lineno for each in found)


@pytest.mark.parametrize("network", ["convnext", "efficientnet"])
def test_a_network_is_at_most_1_3_times_as_long(network: str) -> None:
    """As ruff breaks the lines, for which a layer's arguments are on the network's account."""
    assert lines(network) <= 1.3 * lines(f"plain_{network}"), (lines(network), lines(f"plain_{network}"))

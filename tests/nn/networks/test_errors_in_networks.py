"""Errors in nested networks: they name the layer and where it was built, in a sentence, on every worker."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jobs import run_alone

import distdl_jax as dj
from distdl_jax import nn
from distdl_jax.errors import shown_label
from distdl_jax.tools.cost.layers import placed_layers

WRONG = """
import jax, jax.numpy as jnp, distdl_jax as dj
P = dj.Partition().grid([1, 1])
def linear(n_in, n_out):
    return dj.nn.DistributedLinear(P, P, P, n_in, n_out)
net = dj.nn.Sequential(linear(3, 4), dj.nn.Residual(dj.nn.Sequential(jax.nn.relu, linear(5, 4))))
params = net.init(jax.random.key(0))
net(params, jnp.ones((2, 3)))
"""


def conv(P, n_in, n_out):
    return nn.DistributedConv1d(P.grid([1, 1, P.size]), in_channels=n_in, out_channels=n_out, kernel_size=1)


def network(P, last=2):
    nested = nn.Sequential(jax.nn.relu, nn.Residual(nn.Sequential(jax.nn.relu, conv(P, last, 2))))
    return nn.Sequential(conv(P, 3, 2), nn.Sequential(nested))


def notes(error):
    return [note for note in error.__notes__ if note.startswith("In layer")]


PLACE = r"In layer 1\.0\.1\.body\.1, DistributedConv1d, built at test_errors_in_networks\.py:\d+ in conv\."


@pytest.mark.simulated(2)
@pytest.mark.parametrize("way", ["eager", "jit", "dj.jit", "dj.grad", "output_spec"])
def test_the_place_is_that_of_costs_and_profiles(way):
    P = dj.Partition()
    net, x = network(P, last=5), jnp.ones((2, 3, 4))
    params = net.init(jax.random.key(0))
    calls = {
        "eager": lambda: net(params, x),
        "jit": lambda: jax.jit(net)(params, x),
        "dj.jit": lambda: dj.jit(net)(params, x),
        "dj.grad": lambda: dj.grad(lambda params: jnp.sum(net(params, x)))(params),
        "output_spec": lambda: net.output_spec(dj.TensorSpec((2, 3, 8), P.grid([1, 1, 2]))),
    }
    with pytest.raises(dj.PlanError, match=r"`x` has 2 channels, but in_channels=5\.") as found:
        calls[way]()
    (note,) = notes(found.value)
    assert re.fullmatch(PLACE, note)
    assert "1.0.1.body.1" in [part.place for part in placed_layers(net)]


@pytest.mark.simulated(2)
def test_errors_of_functions_name_the_place_too():
    def divides(x):
        raise ZeroDivisionError

    P = dj.Partition()
    net = nn.Sequential(conv(P, 3, 2), nn.Sequential(divides))
    with pytest.raises(ZeroDivisionError) as found:
        net(net.init(jax.random.key(0)), jnp.ones((2, 3, 4)))
    assert notes(found.value) == ["In layer 1.0, divides."]


@pytest.mark.simulated(2)
def test_parameters_of_another_structure_and_swapped_arguments():
    """In a sentence without the numbers of an array."""
    P = dj.Partition()
    net, x = network(P), jnp.ones((2, 3, 400))
    params, layer = net.init(jax.random.key(0)), conv(P, 3, 2)
    refused = (dj.InvalidTypeError, dj.InvalidArgumentError, dj.PlanError, TypeError)
    for call, words in (
        (lambda: net({"a": params[0], "b": params[1]}, x),
         r"`params` is a dictionary of \['a', 'b'\], but must have an entry"),
        (lambda: net((params[0], {"x": 1}), x), "`params` is a dictionary of .*each part of the network"),
        (lambda: net(3, x), ""),
        (lambda: net(x, params), r"`params` is float\d+\[2, 3, 400\], and `x` is a .*first"),
        (lambda: layer(x, params[0]), r"`params` is float\d+\[2, 3, 400\], and `x` is a .*first"),
        (lambda: layer({0: x}, x), ""),
        (lambda: layer((x,), x), ""),
    ):  # fmt: skip
        with pytest.raises(refused, match=words or None) as found:
            call()
        assert words or len(str(found.value)) < 200
    residual = nn.Residual(nn.Sequential(jax.nn.relu))
    assert residual({"body": ({},)}, x).shape == x.shape  # an entry for a part that is none may be left out


@pytest.mark.simulated(2)
@pytest.mark.parametrize("of", [lambda f: f, dj.jit], ids=["eager", "dj.jit"])
def test_forward_mode_is_refused_in_a_sentence(of):
    layer = conv(dj.Partition(), 3, 2)
    params, x = layer.init(jax.random.key(0)), jnp.ones((2, 3, 4))
    with pytest.raises(dj.InvalidTypeError, match=r"Use dj\.jvp\(fun, primals, tangents\)"):
        jax.jvp(of(lambda x: layer(params, x)), (x,), (x,))


def test_layers_are_named_without_what_is_equal():
    one, other = "Conv(P_x=1 x 2 (0, 1), kernel=(3, 3), n=2)", "Conv(P_x=1 x 2 (0, 1), kernel=(5, 5), n=2)"
    assert shown_label(one) == shown_label(one, "broadcast from 1 (0)") == "Conv"
    assert shown_label(one, other) == "Conv(kernel=(3, 3))"
    for label in ("broadcast from 1 x 1 (0) to 1 x 2 (0, 1)", "the plan of f (a.py:3)", "allgather_data on 2 (0, 1)"):
        assert shown_label(label) == label


@pytest.mark.parametrize("filtering", ["", "off"])
def test_a_traceback_shows_the_users_frames_unless_asked_for_all(tmp_path: Path, filtering: str):
    program = tmp_path / "wrong.py"
    program.write_text(f"import jax\njax.config.update('jax_traceback_filtering', '{filtering or 'auto'}')\n{WRONG}")
    status, output = run_alone(program)
    assert status == 1 and "In layer 1.body.1, DistributedLinear, built at wrong.py:" in output
    frames = re.findall(r'File "(.*?)"', output)
    assert frames[-1] == str(program) if not filtering else any("distdl_jax/nn/base/" in frame for frame in frames)
    assert filtering or not any("distdl_jax/" in frame for frame in frames), output

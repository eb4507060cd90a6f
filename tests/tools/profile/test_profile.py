"""Profiles add up to the step, count what plans count, and name whom the others wait for."""

import json
import random
import textwrap

import numpy as np
import pytest
from jobs import FAST_TO_COMPILE, run

import distdl_jax as dj
from distdl_jax.tools.profile.activities import BACKWARD, FORWARD, MESSAGE, Activities, Activity, Row, row_of
from distdl_jax.tools.profile.compiled_text import Instruction, containers, operation, read_instructions
from distdl_jax.tools.profile.profile import Profile
from distdl_jax.tools.profile.recording import offset_by
from distdl_jax.tools.profile.times import Span, WaitSpan, add_up, causes, meet, shares
from distdl_jax.watchdog.programs.ir import Operation

TEXT = """\
HloModule jit_step, entry_computation_layout={(f32[8,3]{1,0})->f32[]}

%body.2 (p: (s64[], f32[4])) -> (s64[], f32[4]) {
  %wrapped_add = s64[] fusion(%a, %b), kind=kLoop, calls=%fused, metadata={op_name="jit(step)/while/body/add"}
}

ENTRY %main.5 (x: f32[8,3]) -> f32[] {
  %sendrecv_mpi.3 = (f32[1536]{0}, token[]) custom-call(%wrapped_slice, %Arg_0.25), \
custom_call_target="mpi_sendrecv_ffi", operand_layout_constraints={bf16[8,3]{1,0}, token[]}, \
custom_call_has_side_effect=true, metadata={op_name="jit(step)/jvp(#7b)/.0/Conv/#1/windows/sendrecv_mpi"}, \
backend_config={comm = 5 : i64, dest = 1 : i64, recvcount = 1536 : i64, sendcount = 24 : i64, source = -1 : i64}
  %allreduce_mpi.0 = (f32[], token[]) custom-call(%y, %t), custom_call_target="mpi_allreduce_ffi", \
operand_layout_constraints={f32[], token[]}, custom_call_has_side_effect=true, \
metadata={op_name="jit(step)/#13/all_sum_reduce/allreduce_mpi"}, backend_config={comm = 9 : i64, nitems = 1 : i64}
  ROOT %while.1 = (s64[], f32[4]{0}) while(%tuple), condition=%condition.3, body=%body.2
}
"""


def test_instructions_are_read_with_what_they_communicate():
    found = read_instructions(TEXT)
    assert found["while.1"] == Instruction("main.5", ("condition.3", "body.2"))
    assert containers(found, {"while.1", "wrapped_add", "sendrecv_mpi.3"}) == {"while.1"}
    sent = operation(found["sendrecv_mpi.3"], {5: (2, 3)}, nobody=-1)
    assert sent == Operation("sendrecv", (2, 3), dest=3, count=48, dtype="bytes", itemsize=1)
    assert found["sendrecv_mpi.3"].received == 6144
    assert operation(found["allreduce_mpi.0"], {9: (0, 1)}, nobody=-1) == Operation(
        "allreduce", (0, 1), count=4, dtype="bytes", itemsize=1
    )
    assert operation(found["allreduce_mpi.0"], {5: (2, 3)}, nobody=-1) is None  # nobody knows this team


@pytest.mark.parametrize(
    ("scopes", "row"),
    [
        ("jit(step)/jit(flat)/jvp(#10b)/.3/DistributedConv2d/#4/broadcast", Row("3", "DistributedConv2d", FORWARD)),
        ("jit(step)/transpose(jvp(.3))/Residual/.body/.0/jit(relu)", Row("3.body.0", "relu", BACKWARD)),
        ("jit(step)/transpose(jvp(.3))/Residual", Row("3", "Residual", BACKWARD)),
        ("jit(step)/jvp(#3b)/.12/#2/jit(_movement)/repartition", Row("12", "repartition", FORWARD)),
        ("jit(step)/jvp(encoder)/DistributedLinear/while/body", Row("", "encoder/DistributedLinear", FORWARD)),
        ("jit(step)/#13/all_sum_reduce", Row("", "all_sum_reduce", FORWARD)),
        ("jit(step)/transpose(jvp())", Row("", "loss", BACKWARD)),
        ("jit(step)", Row("", "update, rest", FORWARD)),
    ],
)
def test_scopes_name_a_layer_and_a_pass(scopes, row):
    assert row_of(scopes) == row


@pytest.mark.parametrize("seed", range(5))
def test_shares_are_those_of_every_nanosecond(seed):
    draw = random.Random(seed)
    spans = []
    for _ in range(30):
        start = draw.randrange(200)
        spans.append(Span(start, start + draw.randrange(30), draw.randrange(4), draw.random() < 0.5))
    steps = [(10, 80), (95, 150)]
    expected, idle, hidden = np.zeros(4), 0.0, np.zeros(4)
    for time in (time for start, end in steps for time in range(start, end)):
        running = [span for span in spans if span.start <= time < span.end]
        computing = [span for span in running if not span.communicates]
        for span in computing or running:
            expected[span.column] += 1e-9 / len(computing or running)
        for span in running if computing else ():
            hidden[span.column] += 1e-9 * span.communicates
        idle += 0 if running else 1e-9
    found = shares(spans, steps, 4)
    np.testing.assert_allclose(found.seconds, expected, atol=1e-15)
    np.testing.assert_allclose(found.hidden, hidden, atol=1e-15)
    assert found.idle == pytest.approx(idle)
    assert found.seconds.sum() + found.idle == pytest.approx(125e-9)


def message(operation, start, end):
    return Activity(0, MESSAGE, start, end, operation.kind, operation)


def send(dest, start, end):
    return message(Operation("sendrecv", (0, 1, 2), dest=dest, count=8, itemsize=1), start, end)


def receive(source, start, end):
    return message(Operation("recv", (0, 1, 2), source=source), start, end)


def all_reduce(start):
    return message(Operation("allreduce", (0, 1, 2), count=4, itemsize=1), start, 100)


@pytest.mark.parametrize(
    ("everyone", "until", "waited_for"),
    [
        ({0: send(1, 50, 60), 1: receive(0, 10, 62)}, {0: 50, 1: 50}, {0: 0, 1: 0}),  # itself: nobody
        ({0: send(1, 10, 12), 1: receive(0, 50, 52)}, {0: 10, 1: 50}, {0: 0, 1: 1}),  # it was done before
        ({0: all_reduce(10), 1: all_reduce(70), 2: all_reduce(30)}, {0: 70, 1: 70, 2: 70}, {0: 1, 1: 1, 2: 1}),
    ],
)
def test_who_waits_until_when_for_whom(everyone, until, waited_for):
    """A receiver for its sender, and in a collective operation all for the last of the team."""
    met = meet({worker: [everyone[worker]] if worker in everyone else [] for worker in range(3)})
    for worker in everyone:
        assert (met.until[worker].tolist(), met.waited_for[worker].tolist()) == ([until[worker]], [waited_for[worker]])
    arrows = [(arrow.sender, arrow.sent, arrow.receiver, arrow.received) for arrow in met.arrows]
    assert arrows == ([(0, 0, 1, 0)] if len(everyone) == 2 else []) and met.matched


def test_messages_without_a_partner_wait_for_nobody():
    met = meet({0: [send(1, 10, 40)], 1: []})
    assert (met.until[0].tolist(), met.arrows, met.matched) == ([10], (), False)


def test_messages_that_are_not_matched_are_said():
    def alone(operation):
        return Activities((Row("0", "Conv", FORWARD),), ((0, 50),), (Activity(0, MESSAGE, 10, 40, "send", operation),))

    for unmatched in (None, Operation("sendrecv", (0, 1), dest=1, count=8, itemsize=1)):
        found = add_up({0: alone(unmatched)}, 1)
        assert not found.matched
        assert "could not be matched" in Profile(*found, 1).table()


def test_who_waits_is_not_waited_for():
    waits = {0: [WaitSpan(0, 100, 1)], 1: [WaitSpan(10, 30, 2), WaitSpan(50, 120, 2)], 2: [WaitSpan(60, 70, 3)], 3: []}
    assert causes(waits, waits[0][0]) == {1: 10 + 20, 2: 20 + 10 + 30, 3: 10}
    assert causes(waits, waits[1][0]) == {2: 20}


def test_the_clock_of_another_host_is_read_by_the_quickest_answer():
    draw, now = random.Random(0), [10**18]

    def clock():
        now[0] += 50
        return now[0]

    def ask():
        now[0] += (delay := 1000 + draw.randrange(5000))
        there = now[0] + 777_000
        now[0] += delay if draw.random() < 0.3 else 1000
        return there

    assert offset_by(ask, clock) == pytest.approx(777_000, abs=600)


PROGRAM = textwrap.dedent(
    """
    import json, sys, time
    import jax, jax.numpy as jnp, numpy as np
    import distdl_jax as dj
    from distdl_jax import nn

    P = dj.Partition().grid([1, 1, 3, 1])
    conv = {"kernel_size": 3, "padding": 1}
    network = nn.Sequential(
        nn.DistributedConv2d(P, in_channels=2, out_channels=4, **conv),
        jnp.tanh,
        nn.Residual(nn.Sequential(nn.DistributedConv2d(P, in_channels=4, out_channels=4, **conv))),
    )
    spec = dj.TensorSpec((2, 2, 24, 24), P)
    x, params = spec.block(jnp.ones((2, 2, 24, 24))), network.init(jax.random.key(0))

    def late(x):
        time.sleep(0.2)
        return x

    @dj.jit(donate_argnums=0)
    def step(params, x):
        def loss(params):
            y = network(params, x)
            return (y**2).sum()

        with jax.named_scope("slow"):
            x = jax.pure_callback(late, x, x) if P.rank == 2 else x
        value, gradient = dj.value_and_grad(loss)(params)
        return value, jax.tree.map(lambda p, g: p - 1e-3 * g, params, gradient)

    predicted = dj.cost(network, spec, optimiser="sgd")
    profile = dj.profile(step, params, x, steps=4)
    profile.trace(sys.argv[1])
    if P.rank == 0:
        print(profile)
    amounts = {layer.place: layer.amounts for layer in predicted.layers}
    for layer in profile.layers:
        if layer.place:
            for name in ("forward", "backward"):
                np.testing.assert_allclose(
                    getattr(layer, name).bytes, getattr(amounts[layer.place], f"bytes_{name}"), err_msg=layer.title
                )
    total = sum((layer.both.total for layer in profile.layers), profile.idle)
    np.testing.assert_allclose(total, profile.seconds, rtol=1e-6)
    assert profile.matched
    blamed = profile.waited_for.sum(0)
    assert blamed.argmax() == 2, profile.waited_for
    slow = next(layer for layer in profile.layers if layer.name == "slow")
    assert slow.forward.arithmetic.argmax() == 2 and slow.forward.arithmetic[2] > 0.2
    titles = [layer.title for layer in profile.layers]
    assert titles[:3] == ["0 DistributedConv2d", "1 tanh", "2.body.0 DistributedConv2d"], titles
    assert json.loads(profile.to_json())["steps"] == 4
    """
)


@pytest.mark.limit(300)
def test_three_workers_profile_a_step(tmp_path):
    program, path = tmp_path / "program.py", tmp_path / "trace.json"
    program.write_text(PROGRAM)
    status, output = run(3, program, path, flags=FAST_TO_COMPILE)
    assert status == 0, output
    assert "worker 2 is waited for in" in output
    events = json.loads(path.read_text())["traceEvents"]
    assert {event["pid"] for event in events} == {0, 1, 2}
    slices = [event for event in events if event["ph"] == "X"]
    assert sum(event["tid"] == 0 for event in slices) == 3 * 4
    begins, ends = ({e["id"]: e for e in events if e["ph"] == phase} for phase in "sf")
    assert begins.keys() == ends.keys() != set()
    for number, begin in begins.items():
        assert begin["pid"] != ends[number]["pid"]
        assert begin["ts"] < ends[number]["ts"]  # on one clock, nothing comes before it is sent
        assert any(_holds(each, begin) for each in slices)
        assert any(_holds(each, ends[number]) for each in slices)


def _holds(each, event):
    place = (each["pid"], each["tid"]) == (event["pid"], event["tid"])
    return place and each["ts"] <= event["ts"] <= each["ts"] + each["dur"]


def test_what_can_not_be_profiled_is_refused():
    for step, options, error, word in (
        (3, {}, dj.InvalidTypeError, "`step`"),
        (len, {"steps": 0}, dj.InvalidArgumentError, "`steps`"),
    ):
        with pytest.raises(error, match=word):
            dj.profile(step, **options)

    def program():
        with pytest.raises(dj.SetupError, match="threads of one process"):
            dj.profile(len)

    dj.simulate(2, program)

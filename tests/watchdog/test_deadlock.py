"""What is concluded from what the workers say that they do, and what must not be concluded."""

from dataclasses import replace
from zlib import crc32

import pytest

from distdl_jax.watchdog.watch.call_log import REMEMBERED, CallLog, Calls, Earlier
from distdl_jax.watchdog.watch.deadlock import State, View, different_earlier_calls, find_deadlock, workers_text
from distdl_jax.watchdog.watch.dependencies import Dependencies


def calls(names, inside=False, tracing=False, passed=None):
    log = CallLog()
    for name in names:
        log.begin(name)
    summary = log.summary()
    passed = len(names) - inside if passed is None else passed
    return replace(summary, inside=inside, tracing=tracing, passed=passed)


THREE = calls("fff")
INSIDE = calls("fff", inside=True, passed=3)
RUNNING = State("running", calls=THREE)
IN_CALL = State("executing", calls=INSIDE, program=3)
AGREEING = State("agreeing", "a.py:1 in f", "broadcast", (1,), 1, calls("fff", inside=True))
TRACING = replace(AGREEING, calls=calls("fff", inside=True, tracing=True))
LEFT = State("left", calls=THREE)
EVERYBODY = {name: {0: Dependencies(frozenset({1})), 1: Dependencies(frozenset({0}))} for name in "fgh"}


@pytest.mark.parametrize(
    "states",
    [
        {},
        {0: RUNNING, 1: RUNNING},
        {0: IN_CALL, 1: RUNNING},
        {0: IN_CALL, 1: replace(IN_CALL, calls=calls("ff"), program=2)},
        {0: AGREEING, 1: RUNNING},
        {0: AGREEING, 1: replace(IN_CALL, program=0)},  # it may still come
        {0: replace(AGREEING, waits_for=(1,)), 1: replace(AGREEING, waits_for=(2,)), 2: RUNNING},
        {0: IN_CALL, 1: LEFT},  # its part was done before it left
        {0: replace(IN_CALL, program=0), 1: LEFT},
        {0: LEFT, 1: LEFT},
        {0: TRACING, 1: replace(RUNNING, calls=calls("ff"))},
        {0: TRACING, 1: replace(RUNNING, calls=calls("fff", inside=True))},  # it may be about to trace
        # Its program is that of the call before; it traces this one late.
        {0: TRACING, 1: replace(IN_CALL, calls=calls("fff", inside=True), program=2)},
        # It has made other calls before, so its third is another one.
        {0: TRACING, 1: replace(RUNNING, calls=calls("gff"))},
        {0: replace(AGREEING, waits_for=(2,)), 1: LEFT},
        # One agreement: worker 2 has told worker 0, which has worker 1's message to look for first; worker 1 is late.
        {0: replace(AGREEING, waits_for=(1, 2)), 1: RUNNING, 2: replace(AGREEING, waits_for=(0,))},
        {0: replace(AGREEING, waits_for=(1,)), 1: replace(AGREEING, waits_for=(0,))},
        {0: replace(AGREEING, waits_for=(2,)), 1: RUNNING, 2: replace(AGREEING, waits_for=(1, 0))},
        # Nobody waits.
        {0: RUNNING, 1: replace(RUNNING, calls=calls("fgf"))},
        # What is no longer told is not compared.
        {0: replace(IN_CALL, calls=calls("f" * 5000, inside=True)), 1: replace(LEFT, calls=calls("ggg"))},
    ],
)
def test_what_may_still_go_on(states):
    assert find_deadlock(View(states, EVERYBODY)) is None


@pytest.mark.parametrize(
    ("states", "sentence"),
    [
        ({0: AGREEING, 1: LEFT}, "Worker 1 has ended its program, after 3 calls, but worker 0 is about"),
        (
            {0: replace(IN_CALL, calls=calls("ffff", inside=True, passed=4), program=4), 1: LEFT},
            "but worker 0 is in call 4, of f",
        ),
        ({0: IN_CALL, 1: replace(LEFT, status=3)}, "Worker 1 has ended its program with exit status 3"),
        (
            {0: replace(AGREEING, waits_for=(2,)), 1: replace(LEFT, status=1), 2: RUNNING},
            "Worker 1 has ended its program with exit status 1",
        ),
        (
            {0: AGREEING, 1: replace(AGREEING, waits_for=(2,)), 2: replace(AGREEING, waits_for=(3, 0))},
            "in a cycle: worker 0 is about to run broadcast (a.py:1 in f), and waits for worker 1; worker 1",
        ),
        # One is in a program that the other one has not begun, and that waits for the first.
        (
            {
                0: replace(IN_CALL, calls=calls("ffff", inside=True, passed=4), program=4),
                1: replace(AGREEING, calls=THREE, waits_for=(0,)),
            },
            "in a cycle: worker 0 is in call 4, of f; worker 1 is about to run broadcast",
        ),
        ({0: TRACING, 1: IN_CALL}, "Worker 0 traces f again in call 3 (at a.py:1 in f), but worker 1"),
        ({0: TRACING, 1: RUNNING}, "but worker 1 did not"),
        ({0: TRACING, 1: LEFT}, "but worker 1 did not"),
        ({0: IN_CALL, 1: replace(IN_CALL, calls=calls("fgf"))}, "call 2 is f on worker 0 and g on worker 1"),
        ({0: IN_CALL, 1: replace(LEFT, calls=calls("fg"))}, "call 2 is f on worker 0 and g on worker 1"),
    ],
)
def test_what_can_never_go_on(states, sentence):
    if "call 2 is" in sentence:
        called = {0: tuple("fff"), 1: tuple("fgf")}
        states = {w: replace(s, calls=replace(s.calls, names=called[w][: s.calls.number])) for w, s in states.items()}
    assert sentence in find_deadlock(View(states, EVERYBODY, in_full="call 2 is" in sentence)).text


def test_a_message_on_its_way_may_release_who_waits():
    for states in ({0: AGREEING, 1: LEFT}, {0: TRACING, 1: RUNNING}):
        assert find_deadlock(View(states, coming=lambda sender, receiver: (sender, receiver) == (1, 0))) is None
        assert find_deadlock(View(states, coming=lambda sender, receiver: (sender, receiver) == (0, 1))) is not None


def test_calls_are_compared_by_digests():
    a, b = calls("fgf"), calls("fgfh")
    assert a.agrees_with(b) and b.agrees_with(a) and not a.differs_from(b)
    assert a.differs_from(calls("ffff")) and not a.agrees_with(calls("ffff"))
    assert not Calls().agrees_with(a) and not Calls().differs_from(a)  # nothing is known


def test_a_call_that_raised_is_compared_with_nothing_until_all_agree_again():
    log = CallLog()
    log.begin("f")
    log.end(completed=False)
    log.begin("f")
    log.end(completed=True)
    assert log.summary(0, True).digests == log.summary(0, True).names == ()
    log.agree(7, "g")
    log.end(completed=True)
    assert log.summary().digests == (crc32(b"7 g"),) and log.summary(0, True).names == ("g",)
    assert (log.summary().number, log.summary().passed) == (7, 7)


def test_workers_are_listed():
    assert workers_text((3,)) == "worker 3"
    assert workers_text((1, 2, 5)) == "workers 1, 2 and 5"
    assert workers_text(tuple(range(20))) == "workers 0, 1, 2, 3, 4, 5, 6, 7 and 12 more"


def test_a_program_of_an_earlier_call_is_known_too():
    """It goes on beside its thread, which is in the next call."""
    earlier = replace(IN_CALL, program=2, function="g")
    found = find_deadlock(View({0: earlier, 1: replace(LEFT, calls=calls("f"))}, EVERYBODY))
    assert found is not None and set(found.about) == {0, 1}
    assert (
        find_deadlock(View({0: replace(earlier, function=""), 1: replace(LEFT, calls=calls("f"))}, EVERYBODY)) is None
    )
    assert find_deadlock(View({0: earlier, 1: replace(LEFT, calls=calls("ff"))}, EVERYBODY)) is None


def made(names, inside=False):
    log = CallLog()
    for name in names:
        log.begin(name)
        log.end(True)
    if inside:
        log.begin("h")
    return log.earlier()


def test_who_skipped_a_call_is_found_when_all_trace_the_next_function():
    text, about = different_earlier_calls("h", {0: made("f"), 1: made("ff", inside=True), 2: made("ff")})
    assert about == (0, 1) and "worker 0 traces h after 1 calls" in text and "worker 1 after 2" in text
    text, _ = different_earlier_calls("h", {0: made("fg"), 1: made("gf")})
    assert "worker 1 after as many, but not of the same" in text
    assert different_earlier_calls("h", {0: made("fg"), 1: made("fg", inside=True)}) is None
    assert different_earlier_calls("h", {0: Earlier(7, None), 1: made("ff"), 2: made("ff")}) is None


def test_a_call_that_raised_before_it_told_anybody_anything_was_none():
    log = CallLog()
    log.begin("f")
    log.end(True)
    before = log.summary(0, True), log.earlier()
    log.begin("g")
    log.undo()
    assert (log.summary(0, True), log.earlier()) == before
    log.begin("g")
    log.end(False)
    assert log.earlier().digest is None


def test_what_is_told_in_full_decides_on_calls_long_ago():
    """Workers tell few of their digests unasked; of what not even the full ones have, nothing is concluded."""
    log, early = CallLog(), CallLog()
    for number in range(3 * REMEMBERED):
        log.begin(f"f{number}")
        if number < 2 * REMEMBERED + 5:
            early.begin(f"f{number}")
    passed = replace(log.summary(0, in_full=True), passed=log.number, inside=False)
    tracing = replace(early.summary(0, in_full=True), tracing=True, passed=0)
    states = {0: replace(TRACING, calls=tracing), 1: State("running", calls=passed)}
    unasked = {0: states[0], 1: State("running", calls=replace(log.summary(), passed=log.number, inside=False))}
    for view in (View(unasked), View(states, in_full=True)):
        assert f"again in call {early.number} " in find_deadlock(view).text
    assert find_deadlock(View(unasked, in_full=True)) is None


def test_a_call_whose_plan_is_agreed_on_has_not_ended():
    """Its program is compiled first: who is in theirs waits for it."""
    log = CallLog()
    log.begin("f")
    log.agree(5, "f")
    assert log.passed == 5 and log.ended() == 4
    log.end(completed=True)
    assert log.ended() == 5
    log.begin("g")
    assert log.ended() == 5

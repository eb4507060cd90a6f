"""Measured messages beside what a machine's file expects."""

from healthy_job import job

from distdl_jax.doctor import report
from distdl_jax.doctor.facts import Measured, Message
from distdl_jax.tools.cost.machine import load

HDR = load("infiniband-hdr")


def found(everyone, measured, machine):
    """Return what is not ok."""
    return [finding for finding in report.findings(everyone, measured, machine) if finding.verdict != "ok"]


def of_message(everyone, message, machine=HDR):
    return [each for each in found(everyone, Measured((message,)), machine) if each.subject == "message"]


def test_a_slow_message_is_found_beside_the_machines_file():
    expected = HDR.message_seconds(2**20, HDR.level_of(0, 1))
    assert of_message(job(), Message(0, 1, 2**20, 1.9 * expected)) == []
    (slow,) = of_message(job(), Message(0, 1, 2**20, 2.1 * expected))
    assert slow.verdict == "warning"
    assert "from worker 0 to 1, on one host" in slow.found and "the machine's file expects" in slow.found
    crowded = job(host={"cores": 2, "affinity": (0, 1)}, threads={"xla": 1, "onednn": 1})
    assert [each.verdict for each in of_message(crowded, Message(0, 1, 2**20, 2.1 * expected))] == ["note"]


def test_messages_between_hosts_are_compared_with_the_network():
    everyone = job({"host": {"name": "a"}})
    expected = HDR.message_seconds(8, "network")
    assert of_message(everyone, Message(0, 1, 8, 1.5 * expected)) == []
    assert [each.verdict for each in of_message(everyone, Message(0, 1, 8, 3 * expected))] == ["warning"]
    (note,) = of_message(everyone, Message(0, 1, 8, 40e-6), None)
    assert (note.verdict, "the cluster's own MPI" in note.cure) == ("note", True)


def test_a_slow_all_reduce_is_found():
    expected = HDR.collective_seconds("allreduce", 4, 2**20)
    for times, verdicts in ((1.9, []), (2.1, ["warning"])):
        all_found = found(job(), Measured(all_reduces={2**20: times * expected}), HDR)
        assert [each.verdict for each in all_found] == verdicts

"""The choice of an algorithm from given measurements and records."""

from distdl_jax.kernels.cpu.choice import best_everywhere, cheapest, worth_trying
from distdl_jax.kernels.cpu.timing import Measurement

DATA = 1000


def chosen(without, **measured):
    return cheapest({name: Measurement(*one) for name, one in measured.items()}, without, DATA)


def test_the_fastest_here_unless_it_gains_too_little():
    assert chosen("plain", plain=(1.0, 0), other=(0.5, 0)) == "other"
    assert chosen("plain", plain=(1.0, 0), other=(0.95, 0)) == "plain"
    assert chosen("other", plain=(1.0, 0), other=(1.05, 0)) == "other"
    assert chosen("other", plain=(1.0, 0), other=(2.0, 0)) == "plain"
    assert chosen("plain", other=(2.0, 0), third=(1.9, 0)) == "third"  # plain was not tried


def test_memory_has_its_price():
    assert chosen("plain", plain=(1.0, 0), other=(0.8, 2 * DATA)) == "other"
    assert chosen("plain", plain=(1.0, 0), other=(0.8, 10 * DATA)) == "plain"
    assert chosen("other", plain=(1.0, 0), other=(0.8, 100 * DATA)) == "plain"


def test_unseen_only_what_gained_in_every_record_of_two_processors():
    gains, gains_little = {"plain": 6.0, "other": 5.0}, {"plain": 5.9, "other": 5.0}
    assert best_everywhere({"a": [gains, gains], "b": [gains]}) == "other"
    assert best_everywhere({"a": [gains, gains_little], "b": [gains]}) == "plain"
    assert best_everywhere({"a": [gains, gains]}) == "plain"
    assert best_everywhere({"a": [gains], "b": [{"plain": 1.0}]}) == "plain"
    assert best_everywhere({}) == "plain"
    third = {"plain": 6.0, "other": 5.0, "third": 2.0}
    assert best_everywhere({"a": [third], "b": [third, third]}) == "third"
    assert best_everywhere({"a": [third], "b": [gains]}) == "other"


def test_what_was_hopeless_everywhere_is_not_tried():
    slow = {"plain": 9.0, "other": 1.0}
    assert worth_trying({"a": [slow], "b": [slow]}, ("plain", "other")) == ("other",)
    assert worth_trying({"a": [slow]}, ("plain", "other")) == ("plain", "other")
    assert worth_trying({"a": [slow, {"plain": 1.0, "other": 1.0}], "b": [slow]}, ("plain", "other")) == (
        "plain",
        "other",
    )
    assert worth_trying({"a": [slow], "b": [slow]}, ("plain", "third")) == ("plain", "third")

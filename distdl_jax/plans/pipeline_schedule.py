"""The order in which the stages of a pipeline process microbatches forward and backward."""

from __future__ import annotations

from typing import NamedTuple


class OneForwardOneBackward(NamedTuple):
    """The 1F1B schedule: time in ticks, in each of which a stage processes one microbatch forward or one backward.

    Ticks come in rounds of two halves, 0 and 1. In one half a stage goes forward, in the other backward, and its
    neighbours vice versa. So stage s of S processes microbatch m forward in tick s + 2 m and backward in tick 2 S - 1 -
    s + 2 m, with S - s microbatches in flight. A stage waits in a share of (S - 1) / (M + S - 1) of the ticks.

    Source: Narayanan et al. (2019), "PipeDream: generalized pipeline parallelism for DNN training",
    doi:10.1145/3341301.3359646; flushed after each batch as in Narayanan et al. (2021), arXiv:2104.04473.

    >>> schedule = OneForwardOneBackward(stages=2, microbatches=3)
    >>> schedule.rounds, schedule.under_way(0), schedule.is_backward(0, half=1), schedule.microbatch(0, half=1)
    (4, 2, True, -1)
    """

    stages: int
    microbatches: int

    @property
    def last(self) -> int:
        """The last stage."""
        return self.stages - 1

    @property
    def rounds(self) -> int:
        """The number of rounds until the backward pass of the last microbatch."""
        return self.microbatches + self.stages - 1

    def under_way(self, stage: int) -> int:
        """Return the largest number of microbatches in flight in a stage: forward done, but not backward."""
        return self.stages - stage

    def is_backward(self, stage: int, half: int) -> bool:
        """Return whether a stage goes backward in this half of each round."""
        return (half - stage) % 2 == 1

    def microbatch(self, stage: int, half: int) -> int:
        """Return the microbatch that a stage processes in this half of round 0; each round adds 1.

        There is none if it is less than 0, or not less than `microbatches`.
        """
        begins = 2 * self.stages - 1 - stage if self.is_backward(stage, half) else stage
        return (half - begins) // 2

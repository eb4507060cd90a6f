"""The order in which the stages of a pipeline take microbatches forward and backward."""

from __future__ import annotations

from typing import NamedTuple


class OneForwardOneBackward(NamedTuple):
    """The 1F1B schedule: time in ticks, in each of which a stage takes one microbatch forward or one back.

    Ticks come in rounds of two halves, 0 and 1. In one half a stage goes forward, in the other backward, and its
    neighbours the other way round. So stage s of S takes microbatch m forward in tick s + 2 m and back in tick
    2 S - 1 - s + 2 m, and S - s microbatches are under way in it. Of the ticks, a stage waits in (S - 1) / (M + S - 1).

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
        """The number of rounds until the last microbatch is back."""
        return self.microbatches + self.stages - 1

    def under_way(self, stage: int) -> int:
        """Return the most microbatches that went forward through a stage, and not back."""
        return self.stages - stage

    def is_backward(self, stage: int, half: int) -> bool:
        """Return whether a stage goes backward in this half of each round."""
        return (half - stage) % 2 == 1

    def microbatch(self, stage: int, half: int) -> int:
        """Return the microbatch that a stage takes in this half of round 0; each round adds 1.

        There is none if it is less than 0, or not less than `microbatches`.
        """
        begins = 2 * self.stages - 1 - stage if self.is_backward(stage, half) else stage
        return (half - begins) // 2

"""How much each worker stores, computes and sends: the numbers of a layer, or of a network, one entry per worker."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields

import numpy as np

from distdl_jax.functional.halo_exchange import RangesPlan
from distdl_jax.functional.mark import Mark
from distdl_jax.functional.repartition import RepartitionPlan
from distdl_jax.tools.cost.classes import Index, as_index, groups, same, traffic
from distdl_jax.tools.cost.layers import CountedLayer, Joined
from distdl_jax.tools.cost.traces import Communication
from distdl_jax.watchdog.programs.ir import Operation


@dataclass
class Amounts:
    """Numbers of one training step: arrays of integers with an entry for each worker, by world rank.

    Bytes:

    - `parameters`, `gradients`, `optimiser`: of the parameters, their gradients, and the optimiser state.
    - `bytes_forward`, `bytes_backward`: in messages that the worker sends.
    - `team_bytes_forward`, `team_bytes_backward`: passed to collective operations.

    Counts:

    - `flops_forward`, `flops_input`, `flops_parameters`: of the forward pass, and of the two kinds of gradients.
    - `messages_forward`, `messages_backward`: messages that the worker sends.
    - `collectives_forward`, `collectives_backward`: collective operations that it takes part in.
    """

    parameters: np.ndarray
    gradients: np.ndarray
    optimiser: np.ndarray
    flops_forward: np.ndarray
    flops_input: np.ndarray
    flops_parameters: np.ndarray
    messages_forward: np.ndarray
    messages_backward: np.ndarray
    bytes_forward: np.ndarray
    bytes_backward: np.ndarray
    collectives_forward: np.ndarray
    collectives_backward: np.ndarray
    team_bytes_forward: np.ndarray
    team_bytes_backward: np.ndarray

    @classmethod
    def none(cls, workers: int) -> Amounts:
        """Return zeros for `workers`."""
        return cls(*(np.zeros(workers, np.int64) for _ in fields(cls)))

    @classmethod
    def sum(cls, several: Iterable[Amounts], workers: int) -> Amounts:
        """Return the sums over layers, or zeros for `workers`."""
        total = cls.none(workers)
        for amounts in several:
            for field in fields(cls):
                getattr(total, field.name)[...] += getattr(amounts, field.name)
        return total

    def count(self, layer: CountedLayer | Joined, backward: bool) -> None:
        """Add the work of all workers in a layer, in a step with or without gradients of the parameters."""
        if isinstance(layer, Joined):
            self._count_join(layer, backward)
            return
        of_x = layer.has_gradient
        for workers, trace in layer.classes:
            self.flops_forward[workers] += trace.flops
            if backward and of_x:
                self.flops_input[workers] += trace.flops_x
            if backward and layer.uses_params:
                self.flops_parameters[workers] += trace.flops_params
        self._count_communication("forward", [(workers, trace.forward) for workers, trace in layer.classes])
        if backward and (of_x or layer.uses_params):
            self._count_communication("backward", [(each.workers, each.trace.backward(of_x)) for each in layer.classes])

    def _count_join(self, join: Joined, backward: bool) -> None:
        """Add the sum, the product, or the concatenation of two branches' outputs."""
        for worker, workers in groups(join.y):
            y = join.y[worker]
            self.flops_forward[workers] += y.size * (join.kind != "concatenation")
            if join.kind == "product" and backward and join.has_gradient:
                self.flops_input[workers] += 2 * y.size
        for movement, has_gradient in join.movements:
            everyone = np.arange(len(self.parameters))
            self._count_communication("forward", [(everyone, (Mark(movement, False),))])
            if backward and has_gradient:
                self._count_communication("backward", [(everyone, (Mark(movement, True),))])

    def _count_communication(self, back: str, of_classes: Sequence[tuple[np.ndarray, Communication]]) -> None:
        """Add the communication of classes of workers, "forward" or "backward"."""
        total = _Sent.none(len(self.parameters))
        times: dict[tuple[int, bool, int], tuple[Mark, Counter[int]]] = {}
        for number, (workers, communication) in enumerate(of_classes):
            for each in communication:
                if isinstance(each, Mark):
                    key = id(each.plan), each.adjoint, each.copies
                    times.setdefault(key, (each, Counter()))[1][number] += 1
                else:
                    total.add(workers, each)
        for mark, counts in times.values():
            sent = _Sent.of(mark, len(self.parameters))
            for number, count in counts.items():
                workers = of_classes[number][0]
                for field in fields(sent):
                    getattr(total, field.name)[workers] += count * getattr(sent, field.name)[workers]
        for field in fields(total):
            getattr(self, f"{field.name}_{back}")[...] += getattr(total, field.name)

    @property
    def flops(self) -> np.ndarray:
        """All multiplications and additions."""
        return self.flops_forward + self.flops_input + self.flops_parameters

    @property
    def messages(self) -> np.ndarray:
        """All messages sent."""
        return self.messages_forward + self.messages_backward

    @property
    def operations(self) -> np.ndarray:
        """All messages sent, and all collective operations."""
        return self.messages + self.collectives_forward + self.collectives_backward

    @property
    def bytes(self) -> np.ndarray:
        """All bytes sent in messages, or passed to collective operations."""
        in_messages = self.bytes_forward + self.bytes_backward
        return in_messages + self.team_bytes_forward + self.team_bytes_backward


def alike(several: Sequence[Amounts]) -> Iterator[np.ndarray]:
    """Yield groups of workers with equal amounts in each of several layers."""
    codes = np.zeros(1, np.uint64)  # the same for equal numbers; otherwise with probability 2^-64
    for array in (getattr(amounts, field.name) for amounts in several for field in fields(amounts)):
        codes = (codes ^ (codes >> np.uint64(29))) * np.uint64(0x9E3779B97F4A7C15) + array.astype(np.uint64)
    yield from same(np.unique(codes, return_inverse=True)[1].reshape(-1))


@dataclass
class _Sent:
    """The messages of each worker: `Amounts` of one direction."""

    messages: np.ndarray
    bytes: np.ndarray
    collectives: np.ndarray
    team_bytes: np.ndarray

    @classmethod
    def none(cls, workers: int) -> _Sent:
        """Return zeros for `workers`."""
        return cls(*(np.zeros(workers, np.int64) for _ in fields(cls)))

    @classmethod
    def of(cls, mark: Mark, size: int) -> _Sent:
        """Return what each worker of a world of `size` sends in a movement."""
        movement, sent = mark.plan, cls.none(size)
        if isinstance(movement, RepartitionPlan | RangesPlan):
            workers, messages, nbytes = traffic(movement, adjoint=mark.adjoint)
            sent.messages[workers], sent.bytes[workers] = messages, nbytes
        else:
            for team in movement.alike:
                for operation in movement.operations(team[0], adjoint=mark.adjoint):
                    sent.add(as_index(team), operation)
        sent.bytes *= mark.copies
        sent.team_bytes *= mark.copies
        return sent

    def add(self, workers: Index, operation: Operation) -> None:
        """Add an operation in which each of `workers` takes part."""
        if not operation.is_message:
            self.collectives[workers] += 1
            self.team_bytes[workers] += operation.bytes_sent
        elif operation.dest is not None:
            self.messages[workers] += 1
            self.bytes[workers] += operation.bytes_sent

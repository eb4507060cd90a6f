"""Stages of a network on separate teams, which work on different microbatches at the same time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from distdl_jax.errors import InvalidArgumentError, InvalidTypeError, PlanError
from distdl_jax.functional import repartition
from distdl_jax.functional.plan import BlocksPlan, ShapeDtypes
from distdl_jax.functional.repartition import plan_repartition
from distdl_jax.nn.base.calls import layer_call
from distdl_jax.nn.base.layer import Layer, keeps_state
from distdl_jax.nn.networks.layer_compatibility import in_equal_blocks
from distdl_jax.nn.networks.network import Network, RunPart, first_partition, last_partition, params_of_part
from distdl_jax.partitions.partition import Partition
from distdl_jax.plans.pipeline_schedule import OneForwardOneBackward
from distdl_jax.plans.shape_dtype import ShapeDtype
from distdl_jax.transforms.gradients import grad, summed
from distdl_jax.transports.agreement import exchange_shapes
from distdl_jax.validation import check_function, checked_integer

Params = tuple[Any, ...]


@dataclass(frozen=True)
class Pipeline(Network):
    """Consecutive stages through which the batch passes in microbatches: pipeline parallelism.

    Each stage is a layer or an `nn.Sequential` on separate workers. The output of each is repartitioned to the input of
    the next. While a stage works on one microbatch, the previous stage works on the next one, so that all are busy
    except in the `bubble`: the share (s - 1) / (m + s - 1) of the time, for s stages and m microbatches.

    Two schedules give equal results:

    - *GPipe*: `pipeline(params, x)` in a loss, differentiated as any network. All microbatches go forward, then all
      backward: a stage stores its residuals for each, or only its inputs with `nn.Remat(stage)`.
    - *1F1B*: `pipeline.value_and_grad(loss)`. A microbatch goes backward as soon as it can: a stage stores the inputs
      of at most s microbatches, and is computed twice.

    **Arguments:**

    - `stages`: layers or networks with known partitions; independent for each sample, as all layers are except batch
      norm in training, which uses the statistics of a microbatch.
    - `microbatches`: the number of equal parts into which each worker's block is cut, along the first dimension.

    The batch is dimension 0 of the input and of the output, split over the same number of workers in both, with the
    same number of samples each, a multiple of `microbatches`. Parameters and state are a tuple with an entry for each
    stage. It is called like `nn.Sequential`; a `key` is split among the microbatches.

    **Raises,** on every worker: `InvalidTypeError` for a stage that is not a layer; `InvalidArgumentError` if a stage
    does not know its partitions, or the split of the batch differs at the end; when applied, `PlanError` if the batch
    can't be cut.

    >>> import jax, distdl_jax as dj
    >>> P = dj.Partition().grid([1, 1])
    >>> stages = [dj.nn.DistributedLinear(P, P, P, 3, 3), dj.nn.DistributedLinear(P, P, P, 3, 2)]
    >>> pipeline = Pipeline(stages, microbatches=4)
    >>> pipeline(pipeline.init(jax.random.key(0)), jax.numpy.ones((8, 3))).shape, pipeline.bubble
    ((8, 2), 0.2)

    Source: Huang et al. (2019), "GPipe", arXiv:1811.06965; for 1F1B see `value_and_grad`.
    """

    stages: Sequence[Any]
    microbatches: int

    def __post_init__(self) -> None:
        self._store(stages=tuple(self.stages))
        if not self.stages:
            raise InvalidArgumentError("`stages` (=()) must be one layer or more.")
        for place, stage in enumerate(self.stages):
            if not isinstance(stage, Layer):
                raise InvalidTypeError(f"`stages[{place}]` (={stage!r}) must be a layer or a network.")
            if first_partition((stage,)) is None or last_partition((stage,)) is None:
                raise InvalidArgumentError(
                    f"`stages[{place}]` (={stage!r}) must have an `input_partition` and an `output_partition`."
                )
        checked_integer("microbatches", self.microbatches, 1)
        first, last = self._moves[0][0], self.output_partition
        if first.shape[:1] != last.shape[:1]:
            raise InvalidArgumentError(
                f"`stages` take the batch split over {first.shape[0]} workers, but leave it split over "
                f"{last.shape[0]}: both numbers must be equal."
            )

    @property
    def bubble(self) -> float:
        """The share of the time in which a stage waits, if all stages take the same time: (s - 1) / (m + s - 1)."""
        waits = len(self.stages) - 1
        return waits / (self.microbatches + waits)

    @property
    def input_partition(self) -> Partition:
        """The partition of the first stage's input."""
        return self._moves[0][0]

    @property
    def output_partition(self) -> Partition:
        """The partition of the last stage's output."""
        return _known(last_partition(self.stages))

    @cached_property
    def _moves(self) -> list[tuple[Partition, Partition]]:
        """The partitions on which each stage's input arrives, and from which it takes it."""
        inputs = [_known(first_partition((stage,))) for stage in self.stages]
        outputs = [_known(last_partition((stage,))) for stage in self.stages]
        return list(zip([inputs[0], *outputs], inputs, strict=False))

    @property
    def _parts(self) -> tuple[tuple[int, Any], ...]:
        return tuple(enumerate(self.stages))

    def _pack(self, entries: Iterable[Any]) -> Params:
        return tuple(entries)

    def _forward(self, run: RunPart, x: Array) -> Array:
        for place, stage in self._parts:
            x = run(place, stage, self._to_stage(place, x))
        return x

    def _to_stage(self, place: int, x: Array) -> Array:
        """Return the input of a stage, from the output of the previous one."""
        P_x, P_y = self._moves[place]
        return x if in_equal_blocks(P_x, P_y) else repartition(x, P_x, P_y)

    def _from_stage(self, place: int, dx: Array) -> Array:
        """Return the cotangent of the previous stage's output, from the cotangent of a stage's input."""
        P_x, P_y = self._moves[place]
        return dx if in_equal_blocks(P_x, P_y) else repartition(dx, P_y, P_x)

    def plan(self, x: ShapeDtypes, params: Mapping[int, Params] | None = None) -> BlocksPlan:
        """Plan the layer for all workers' blocks: without communication, with the same result on every worker.

        **Raises:** `PlanError` if the batch can't be cut into microbatches, or x or a parameter does not fit.
        """
        self._check_batch(x)
        blocks: ShapeDtypes = {
            worker: ShapeDtype(self._cut_shape(block.shape)[1:], block.dtype) for worker, block in x.items()
        }
        samples = {worker: blocks[worker].shape[0] for worker in self.input_partition.ranks}
        for (place, stage), (P_x, P_y) in zip(self._parts, self._moves, strict=True):
            if not in_equal_blocks(P_x, P_y):
                blocks = plan_repartition(blocks, P_x, P_y).after(blocks)
            blocks = stage.plan(blocks, params_of_part(params, place)).after(blocks)
        if any(blocks[worker].shape[0] not in samples.values() for worker in self.output_partition.ranks):
            raise PlanError("`stages` change the number of samples, dimension 0.")
        return BlocksPlan(
            {
                worker: ShapeDtype((self.microbatches * block.shape[0], *block.shape[1:]), block.dtype)
                for worker, block in blocks.items()
            }
        )

    def _check_batch(self, x: ShapeDtypes) -> None:
        """Reject a batch that can't be cut into equal microbatches."""
        samples = {worker: x[worker].shape[:1] for worker in self.input_partition.ranks}
        if len(set(samples.values())) > 1 or any(not n or n[0] % self.microbatches for n in samples.values()):
            raise PlanError(
                f"`x` has {', '.join(f'{n[0] if n else 1} samples on worker {w}' for w, n in samples.items())}: all "
                f"workers must have the same number, a multiple of `microbatches` (={self.microbatches})."
            )

    def _cut_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return (self.microbatches, shape[0] // self.microbatches, *shape[1:])

    def _microbatches(self, x: Array) -> Array:
        """Return this worker's block with microbatches as a leading dimension; all workers check theirs together."""
        world, partitions = self.input_partition.world, {P for pair in self._moves for P in pair}
        team = tuple(sorted({worker for P in (*partitions, self.output_partition) for worker in P.ranks}))
        if world.rank in team:
            self._check_batch(exchange_shapes(world, team, f"microbatches of {len(self.stages)} stages", x))
        return x.reshape(self._cut_shape(x.shape))

    @layer_call
    def __call__(
        self, params: Any, x: Array, *, state: Any = None, training: bool = True, key: Array | None = None
    ) -> Any:
        """Apply the stages, one microbatch at a time.

        **Arguments and returns:** as `nn.Sequential`. The state is passed from microbatch to microbatch.

        **Raises:** `InvalidTypeError` if `training` is not True or False; `PlanError`, on every worker, if the batch
        can't be cut; errors of the stages.
        """
        keys = None if key is None else jax.random.split(key, self.microbatches)

        def one(state: Any, given: tuple[Array, Array | None]) -> tuple[Any, Array]:
            x, key = given
            result: Any = Network.__call__(self, params, x, state=state, training=training, key=key)
            return (None, result) if state is None else result[::-1]

        after, y = lax.scan(one, state, (self._microbatches(x), keys))
        y = y.reshape(y.shape[0] * y.shape[1], *y.shape[2:])
        return y if state is None else (y, after)

    apply = __call__

    def value_and_grad(self, loss: Callable[..., Array]) -> Callable[..., tuple[Array, Params]]:
        """Return a function that computes a loss of the output and its gradient, by the 1F1B schedule.

        A stage starts the backward pass of a microbatch as soon as the last stage is done with it, and stores the
        inputs of at most s microbatches, for s stages; a stage is recomputed for its gradient.

        **Arguments:** `loss`: a function `loss(y, *targets)` of this worker's blocks of the output and the targets of a
        microbatch, which returns this worker's part of the mean over the microbatch, as the losses of `nn` do; 0 on a
        worker without outputs.

        **Returns:** a function of (params, x, *targets), for `dj.jit`, that all workers of the world call. `targets`
        are pytrees of blocks on the partition of the output, cut like x; elsewhere zero-volume. It returns the mean of
        the microbatches' losses, summed over workers, and this worker's blocks of the gradient with respect to params.

        **Raises:** `InvalidTypeError` if `loss` is not a function; `InvalidArgumentError` for stages with a state or
        random numbers, which the other schedule supports; errors of the stages.

        >>> import jax, distdl_jax as dj
        >>> P = dj.Partition().grid([1, 1])
        >>> pipeline = Pipeline([dj.nn.DistributedLinear(P, P, P, 3, 2)], microbatches=2)
        >>> step = dj.jit(pipeline.value_and_grad(dj.nn.DistributedMSELoss(P)))
        >>> value, gradient = step(pipeline.init(jax.random.key(0)), jax.numpy.ones((4, 3)), jax.numpy.ones((4, 2)))
        >>> gradient[0]["weight"].shape
        (2, 3)

        Source: `plans/pipeline_schedule.py`.
        """
        check_function("loss", loss)
        if self.draws or any(keeps_state(stage) and jax.tree.leaves(stage.state_specs()) for stage in self.stages):
            raise InvalidArgumentError(
                "`stages` have a state or draw random numbers, which this schedule does not support: differentiate "
                "`pipeline(params, x)` with dj.value_and_grad instead."
            )

        def run(params: Params, x: Array, *targets: Any) -> tuple[Array, Params]:
            self._check_entries("params", params)
            cut = [jax.tree.map(lambda t: t.reshape(self._cut_shape(t.shape)), target) for target in targets]
            return _OneForwardOneBackward(self, loss, params, self._microbatches(x), cut).value_and_gradient()

        return run

    def _check_entries(self, name: str, entries: Any) -> None:
        if len(entries) != len(self.stages):
            raise InvalidArgumentError(f"`{name}` has {len(entries)} entries, but there are {len(self.stages)} stages.")


class _Carry(NamedTuple):
    """The values that workers carry from tick to tick, for each stage; initially zeros.

    - `inputs`: of the microbatches in flight, stacked.
    - `outputs`: the last output. - `cotangents`: the last cotangent of an input.
    - `gradients`: with respect to parameters, so far. - `value`: the loss so far.
    """

    inputs: list[Array]
    outputs: list[Array]
    cotangents: list[Array]
    gradients: list[Any]
    value: Array


class _OneForwardOneBackward:
    """A loss and its gradient by the 1F1B schedule, a loop over pairs of ticks.

    In each tick a stage processes one microbatch forward or one backward: see `plans/pipeline_schedule.py`. First all
    neighbours exchange their results of the previous tick, then all compute.
    """

    def __init__(
        self, pipeline: Pipeline, loss: Callable[..., Array], params: Params, x: Array, targets: list[Any]
    ) -> None:
        self.pipeline, self.loss, self.params, self.x, self.targets = pipeline, loss, params, x, targets
        self.schedule = OneForwardOneBackward(len(params), pipeline.microbatches)

    def value_and_gradient(self) -> tuple[Array, Params]:
        def round_of_two_ticks(carry: _Carry, round_: Array) -> tuple[_Carry, None]:
            return self._tick(1, round_, self._tick(0, round_, carry)), None

        carry, _ = lax.scan(round_of_two_ticks, self._nothing(), jnp.arange(self.schedule.rounds))
        world = self.pipeline.input_partition.world
        value = summed(carry.value, Partition.of_workers(world, range(world.size)))
        return value, tuple(carry.gradients)

    def _nothing(self) -> _Carry:
        """Return zeros in the shapes of this worker's blocks."""
        inputs, outputs, shape = [], [], jax.eval_shape(lambda x: x[0], self.x)
        for s, stage in enumerate(self.pipeline.stages):
            inputs.append(shape)
            outputs.append(jax.eval_shape(stage, self.params[s], shape))
            if s < self.schedule.last:
                shape = jax.eval_shape(partial(self.pipeline._to_stage, s + 1), outputs[s])
        value = jax.eval_shape(lambda y: self._loss(y, 0), outputs[-1])
        buffers = [jnp.zeros((self.schedule.under_way(s), *x.shape), x.dtype) for s, x in enumerate(inputs)]
        zeros = partial(jax.tree.map, lambda x: jnp.zeros(x.shape, x.dtype))
        return _Carry(buffers, zeros(outputs), zeros(inputs), zeros(list(self.params)), zeros(value))

    def _tick(self, half: int, round_: Array, carry: _Carry) -> _Carry:
        arrived = {}
        for s in range(self.schedule.stages):
            if not self.schedule.is_backward(s, half):
                arrived[s] = self.pipeline._to_stage(s, carry.outputs[s - 1]) if s else None
            elif s < self.schedule.last:
                arrived[s] = self.pipeline._from_stage(s + 1, carry.cotangents[s + 1])
        for s in range(self.schedule.stages):
            microbatch = self.schedule.microbatch(s, half) + round_
            step = self._backward if self.schedule.is_backward(s, half) else self._forward
            there = (microbatch >= 0) & (microbatch < self.pipeline.microbatches)
            carry = lax.cond(there, partial(step, s), lambda carry, *_: carry, carry, microbatch, arrived.get(s))
        return carry

    def _forward(self, s: int, carry: _Carry, microbatch: Array, x: Array | None) -> _Carry:
        x = self.x[microbatch] if x is None else x
        inputs, outputs = [*carry.inputs], [*carry.outputs]
        inputs[s] = inputs[s].at[microbatch % self.schedule.under_way(s)].set(x)
        if s < self.schedule.last:  # the last stage is computed together with its gradient
            outputs[s] = self.pipeline.stages[s](self.params[s], x)
        return carry._replace(inputs=inputs, outputs=outputs)

    def _backward(self, s: int, carry: _Carry, microbatch: Array, dy: Array | None) -> _Carry:
        def scalar(params: Any, x: Array) -> tuple[Array, Array]:
            y = self.pipeline.stages[s](params, x)
            value = self._loss(y, microbatch) if dy is None else jnp.sum(dy * y).real
            return value, value

        x = carry.inputs[s][microbatch % self.schedule.under_way(s)]
        places = (0, 1) if s else (0,)  # the first stage's input may hold integers
        (gradient, *dx), value = grad(scalar, places, has_aux=True)(self.params[s], x)
        gradients, cotangents = [*carry.gradients], [*carry.cotangents]
        gradients[s] = jax.tree.map(jnp.add, gradients[s], gradient)
        if s:
            cotangents[s] = dx[0]
        value = carry.value + value if s == self.schedule.last else carry.value
        return carry._replace(gradients=gradients, cotangents=cotangents, value=value)

    def _loss(self, y: Array, microbatch: Any) -> Array:
        targets = [jax.tree.map(lambda t: t[microbatch], target) for target in self.targets]
        return self.loss(y, *targets) / self.pipeline.microbatches


def _known(P: Partition | None) -> Partition:
    assert P is not None  # __post_init__ rejects stages that don't have it
    return P

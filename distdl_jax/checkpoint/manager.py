"""Checkpoints that are written while training continues, of which the last few are kept."""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Any

from distdl_jax.checkpoint.agreement import together
from distdl_jax.checkpoint.disk import Disk, Folder, checked_path, folders_in, remove_folder
from distdl_jax.checkpoint.reading import restore_and_place, steps
from distdl_jax.checkpoint.writing import ManagerRun, Writing, begin, not_saved, world_of_specs
from distdl_jax.errors import InvalidArgumentError
from distdl_jax.partitions.formats.boxes_in_files import Pause
from distdl_jax.transports.threads.current_world import simulated_world
from distdl_jax.transports.world import World
from distdl_jax.validation import checked_integer
from distdl_jax.watchdog.watch.abort import end_the_job, is_forked

LOOKS_EVERY = 0.25
"""Seconds between two checks of the thread's progress."""


class Manager:
    """Saves checkpoints while training continues, and keeps the last few of them.

    `save` copies this worker's blocks to the host (using memory for one more copy of them, until they are written) and
    returns; a thread writes them. One checkpoint is written at a time: `save` first waits for the previous one. Errors
    in a thread are raised by the next `save`, `wait`, `restore` or `close`, on all workers. The end of the `with` waits
    for the last checkpoint; without a `with`, the end of the program does.

    **Arguments:**

    - `path`: the folder of the run, as for `dj.checkpoint.save`. Unfinished leftovers of killed jobs are removed by the
      first `save`, so only one manager, of one job, may write to a folder at a time.
    - `keep`: the number of last steps to keep; None for all.
    - `keep_every`: multiples of this step are kept, too.

    **Raises:** `InvalidArgumentError`, `InvalidTypeError` for invalid arguments.

    >>> import tempfile, jax.numpy as jnp, distdl_jax as dj
    >>> P = dj.Partition().grid([1])
    >>> spec = dj.TensorSpec((3,), P)
    >>> with tempfile.TemporaryDirectory() as path, Manager(path, keep=2, keep_every=10) as manager:
    ...     for step in (10, 11, 12, 13):
    ...         manager.save(jnp.full(3, step), spec, step)
    ...     manager.steps(), manager.restore(spec).tolist()
    ([10, 12, 13], [13, 13, 13])
    """

    def __init__(self, path: str | os.PathLike[str], keep: int | None = 3, keep_every: int | None = None) -> None:
        self.path = checked_path(path)
        self.keep = None if keep is None else checked_integer("keep", keep, 1)
        self.keep_every = None if keep_every is None else checked_integer("keep_every", keep_every, 1)
        self._writer: _Writer | None = None
        self._world: World | None = None
        self._last: int | None = None  # the step that was restored or saved last
        self._abandoned: dict[Folder, int] = {}
        self._closed = False

    def save(self, tree: Any, specs: Any, step: int) -> None:
        """Start saving a tree; arguments and collectivity are as for `dj.checkpoint.save`.

        Once it returns, the arrays may be donated or changed. Steps must ascend; to go back to an earlier one, use this
        Manager's `restore`.

        **Raises,** on all workers: errors of `dj.checkpoint.save`, for this tree or the previous one;
        `InvalidArgumentError` if the folder has a checkpoint of a higher step, for instance of another run or of
        another job, unless this Manager's last `restore` has gone back from it.
        """
        if self._closed:
            raise InvalidArgumentError("This Manager is closed, and can't save any more.")
        world = world_of_specs(specs)
        self.wait()
        run = ManagerRun(self._last, self._abandoned, begins=self._world is None)
        writing = begin(self.path, step, tree, specs, world, run)
        self._last = writing.step
        if self._world is None and simulated_world.value is None:
            atexit.register(self._at_exit)  # after the world's own function, and therefore called before it
        self._world = world
        self._writer = _Writer(writing, self._remove_old if world.rank == 0 else None)

    def wait(self) -> None:
        """Return when all saved checkpoints are on disk. Collective.

        **Raises,** on all workers: `CheckpointError` if that was not possible.
        """
        writer, self._writer = self._writer, None
        if writer is None or self._world is None:
            return
        try:
            label = f"the end of the checkpoint of step {writer.step}"
            together(self._world, label, writer.own_part, writer.completed)
        except Exception as error:
            writer.cancel()
            raise not_saved(writer.step, error) from error

    def restore(self, specs: Any, step: int | None = None) -> Any:
        """Call `dj.checkpoint.restore`, once all saved checkpoints are on disk. Collective.

        The run continues from that step: the next `save` of a step below the last later one sets the later ones aside,
        the last one first, under the names `step-....abandoned-...`, which you may remove. Checkpoints that another job
        completes after this call are never set aside.
        """
        self.wait()
        tree, self._last, self._abandoned = restore_and_place(self.path, specs, step)
        return tree

    def steps(self) -> list[int]:
        """Return the complete steps, once all saved checkpoints are on disk. Collective."""
        self.wait()
        return steps(self.path)

    def latest_step(self) -> int | None:
        """Return the last complete step; None if there is none. Collective."""
        return max(self.steps(), default=None)

    def close(self) -> None:
        """Wait for saved checkpoints; nothing can be saved any more. Collective."""
        self._closed = True
        atexit.unregister(self._at_exit)
        self.wait()

    def __enter__(self) -> Manager:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if is_forked():  # a process forked by a worker leaves; the checkpoint is the worker's
            return
        if kind is None:
            self.close()
            return
        # Other workers may not arrive here: nothing is agreed on, and an incomplete checkpoint is left.
        self._closed = True
        atexit.unregister(self._at_exit)
        if self._writer is not None:
            self._writer.cancel()

    def _at_exit(self) -> None:
        if is_forked():
            return
        try:
            self.close()
        except Exception as error:
            end_the_job(f"{type(error).__name__}: {error}\n")

    def _remove_old(self, target: Disk, step: int) -> None:
        """Remove the checkpoints beyond `keep` and `keep_every`, after this step was saved."""
        if self.keep is None:
            return
        folders = folders_in(self.path)
        last = sorted({folder.step for folder in folders})[-self.keep :]
        for folder in folders:
            stays = folder.step in (*last, step) or (self.keep_every and folder.step % self.keep_every == 0)
            if not stays:
                remove_folder(target, self.path, folder.name)


class _Writer:
    """The thread that writes this worker's part of a checkpoint, and on the first worker completes it."""

    def __init__(self, writing: Writing, after: Callable[[Disk, int], None] | None) -> None:
        """`after`: called with the disk and the step when the checkpoint is complete; only on the first worker."""
        self.step = writing.step
        self._writing = writing
        self._after = after
        self._cancelled = threading.Event()
        self._own_part = threading.Event()
        self._pieces = 0
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name=f"checkpoint of step {self.step}", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._writing.write(self._count)
            self._own_part.set()
            if self._after is not None and self._writing.wait_for_all(self._cancelled):
                self._writing.complete()
                with suppress(OSError):  # leftovers are removed after the next one
                    self._after(self._writing.disk, self.step)
        except Exception as error:
            self._error = error
        finally:
            self._own_part.set()

    def _count(self) -> None:
        self._pieces += 1

    def own_part(self, pause: Pause) -> None:
        """Wait until this worker's file is on disk; raise errors of the thread. A stalled disk is one piece."""
        pieces = -1
        while not self._own_part.wait(LOOKS_EVERY):
            if self._pieces != pieces:
                pieces = self._pieces
                pause()
        if self._error is not None:
            raise self._error

    def completed(self, _: Any) -> None:
        """On the first worker, when all files are on disk, wait until the checkpoint is complete."""
        self._thread.join()
        if self._error is not None:
            raise self._error

    def cancel(self) -> None:
        """Stop waiting for other workers; on the first one, remove the unfinished checkpoint."""
        self._cancelled.set()
        self._thread.join()
        if self._after is not None:
            self._writing.abandon()

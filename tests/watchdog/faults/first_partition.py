"""Set-up: what is wrong before the first partition, or by its arguments. Nothing here imports the library in advance.

workers: 2
"""

import argparse
import atexit
import os
import sys
import time

WORKER = os.environ.get("PMI_RANK", os.environ.get("OMPI_COMM_WORLD_RANK"))
OPENS = ("-c", "import distdl_jax as dj; dj.Partition()")


def opens():
    import distdl_jax as dj

    return dj.Partition()


def becomes(*words):
    os.execv(sys.executable, [sys.executable, "-m", "distdl_jax", *words])


def agreement_after_the_end():
    """An exit handler that was there before the first partition agrees with others, on one worker only.

    timeout: 4
    when: long
    says: distdl_jax ends the job: the programs of all workers have ended, but
    says: is still at {file}:{+11} in last
    """

    def last():
        if P.rank == 0:
            P.allgather_data(0)

    atexit.register(last)
    P = opens()


def another_launcher():
    """mpirun belongs to another MPI than Python's: every process believes that it is alone.

    workers: none
    says: The launcher started 4 processes, but this one believes that it is alone
    """
    os.environ["PMI_SIZE"] = "4"
    opens()


def exception_before_the_first_partition():
    """One worker fails before it makes a partition; the others wait for it there.

    by: -m distdl_jax
    says: Worker 1 of 2 (process {...}) ended with exit status 1, before it had a partition with others; the job ends.
    says: ValueError: no such configuration
    """
    from mpi4py import MPI

    if MPI.COMM_WORLD.rank == 1:
        raise ValueError("no such configuration")
    opens()


def exit_before_the_first_partition():
    """One worker leaves before the first partition, by a wrong option, say; the others wait for it in MPI's start.

    by: -m distdl_jax
    says: error: unrecognized arguments: --fast
    says: Worker 1 of 2 (process {...}) ended with exit status 2, before it had a partition with others; the job ends.
    """
    argparse.ArgumentParser().parse_args(["--fast"] if WORKER == "1" else [])
    opens()


def fails_to_start():
    """JAX can't be imported in one worker's environment; the other one would wait for it in MPI's start.

    says: Worker 1 of 2 (process {...}) ended with exit status 1, before it had a partition with others; the job ends.
    says: ValueError: invalid truth value 'lots' for environment 'JAX_ENABLE_X64'
    """
    if WORKER == "1":
        os.environ["JAX_ENABLE_X64"] = "lots"
    becomes(*OPENS)


def freed_communicator():
    """A partition is made of a communicator that was freed.

    says: `comm` is MPI.COMM_NULL
    """
    from mpi4py import MPI

    import distdl_jax as dj

    comm = MPI.COMM_WORLD.Dup()
    comm.Free()
    dj.Partition(comm)


def import_error_first():
    """One worker can't import what the program needs, before it imports distdl_jax; the others wait for it in MPI.

    by: -m distdl_jax
    says: ended with exit status 1, before it had a partition with others; the job ends.
    says: No module named 'no_such_module'
    """
    if WORKER == "1":
        import no_such_module  # noqa: F401
    opens()


def jit_disabled():
    """JAX_DISABLE_JIT is set on one worker: all refuse it when the first partition is made.

    by: python
    says: All workers must have the same jax_disable_jit
    """
    if WORKER == "1":
        os.environ["JAX_DISABLE_JIT"] = "1"
    opens()


def never_starts():
    """One worker hangs before it starts MPI (its file system doesn't answer, say); the other one waits in MPI's start.

    timeout: 3
    says: Worker 0 of 2 (process {...}) has waited for {timeout} s (DISTDL_JAX_TIMEOUT, {...}) for MPI to start
    """
    if WORKER == "1":
        time.sleep(10_000)
    becomes(*OPENS)


def no_partition():
    """One worker makes no partition: it has gone another way before the first one.

    when: long
    timeout: 3
    says: A worker has waited for {timeout} s
    says: {file}
    says: to come to the first partition of a communicator. The job goes on.
    says: for others to come to the first partition of a communicator
    """
    from mpi4py import MPI

    if MPI.COMM_WORLD.rank == 0:
        opens()
    time.sleep(10_000)


def output_lost():
    """One worker's output is closed before it starts, and nothing it says can be read; it fails. Another one says so.

    says: Worker 1 of 2 raised; the job ends.
    says: ValueError: nobody reads this here
    """
    from mpi4py import MPI

    if MPI.COMM_WORLD.rank == 1:
        os.closerange(1, 3)
    P = opens()
    if P.rank == 1:
        raise ValueError("nobody reads this here")
    P.allgather_data(0)


def program_missing():
    """The program's file is missing on one host.

    says: there is no file 'no_such_program.py'
    says: Worker 1 of 2 (process {...}) ended with exit status 1, before it had a partition with others; the job ends.
    """
    becomes(*["no_such_program.py"] if WORKER == "1" else OPENS)


def several_devices():
    """A process with several JAX devices.

    when: long
    environment: XLA_FLAGS=--xla_force_host_platform_device_count=2
    says: This process has 2 JAX devices
    """
    from parts import dj, on_root, spread

    dj.jit(lambda x: spread(x))(on_root(4, 6))


def world_too_small():
    """The program wants more workers than were started.

    says: `ranks` (=(0, 1, 2, 3)) names rank 2, but the partition of 2 workers has ranks 0 to 1
    says: To start 4 workers: `mpiexec -n 4 python -m distdl_jax PROGRAM`
    """
    opens().create_partition_inclusive(range(4))


def wrong_setting():
    """A setting is wrong on one worker: all refuse it, each with the same sentence, and none waits for the others.

    status: 0
    says: worker 0 refuses: The environment variable DISTDL_JAX_ONEDNN (='lots', on worker 1) must be on or off
    says: worker 1 refuses: The environment variable DISTDL_JAX_ONEDNN (='lots', on worker 1) must be on or off
    """
    if WORKER == "1":
        os.environ["DISTDL_JAX_ONEDNN"] = "lots"
    import distdl_jax as dj

    try:
        dj.Partition()
    except dj.SetupError as error:
        print(f"worker {WORKER} refuses: {error}")


def x64_differs():
    """64-bit numbers are switched on on one worker.

    says: All workers must have the same jax_enable_x64
    says: worker 1
    """
    import jax

    jax.config.update("jax_enable_x64", WORKER == "0")
    opens()


if __name__ == "__main__":
    globals()[sys.argv[1]]()

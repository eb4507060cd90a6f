"""Nothing is wrong: workers have a pool of processes that import the program, and so the library, anew.

workers: 2
status: 0
says: worker 0 is done: [0, 1, 4]
says: worker 1 is done: [0, 1, 4]
"""

import multiprocessing

import distdl_jax as dj


def square(x):
    return x * x


if __name__ == "__main__":
    P = dj.Partition()
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        squares = pool.map(square, range(3))
    P.allgather_data(0)
    print(f"worker {P.rank} is done: {squares}", flush=True)

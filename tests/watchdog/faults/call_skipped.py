"""One worker leaves out a call whose messages MPI keeps: those of the next function would take their place, in silence.

workers: 2
says: The workers call different functions: worker 0 traces evaluate
says: after 3 calls of functions that all workers must call, worker 1 after 2.
"""

from parts import dj, on_root, rank, spread


@dj.jit
def train(x):
    return spread(x)


@dj.jit
def evaluate(x):
    return spread(2 * x)


x = on_root(4, 4)
for number in range(3):
    if rank == 0 or number != 1:
        train(x)
print(evaluate(x))

/* Holds MPI's calls up at random, for up to 10 ms, and now and then for 0.4 s, so that workers come in other orders.

     cc -shared -fPIC -o delays.so tools/delays.c -ldl
     DELAYS_SEED=1 LD_PRELOAD=$PWD/delays.so python -m pytest -k "world1 or world2 or world3 or world4"
     LD_PRELOAD=$PWD/delays.so python -m pytest tests/watchdog/test_faults.py

   For MPICH on Linux. Each worker draws numbers of its own. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

typedef int Comm, Type, Op; /* as MPICH has them */

static void *mpi(const char *name) {
    void *library = dlopen("libmpi.so.12", RTLD_LAZY | RTLD_NOLOAD);
    void *found = library ? dlsym(library, name) : NULL;
    if (!found) {
        fprintf(stderr, "delays.so: there is no %s in libmpi.so.12\n", name);
        abort();
    }
    return found;
}

static int number(const char *variable) {
    const char *text = getenv(variable);
    return text ? atoi(text) : 0;
}

static void hold_up(int polls) {
    static __thread unsigned state;
    if (!state) {
        unsigned worker = (unsigned)number("PMI_RANK"), seed = (unsigned)number("DELAYS_SEED");
        state = 1 + 7919 * worker + 104729 * seed + (unsigned)gettid() % 97;
    }
    int drawn = rand_r(&state) % 1000;
    long microseconds = 0;
    if (polls)
        microseconds = drawn < 20 ? 5000 : 0;
    else if (drawn < 150)
        microseconds = 500L * (rand_r(&state) % 20);
    else if (drawn < 153)
        microseconds = 400000;
    if (microseconds) {
        struct timespec pause = {microseconds / 1000000, microseconds % 1000000 * 1000};
        nanosleep(&pause, NULL);
    }
}

#define HELD_UP(name, polls, parameters, arguments)                \
    int MPI_##name parameters {                                    \
        static int(*real) parameters;                              \
        if (!real)                                                 \
            real = (int(*) parameters)mpi("PMPI_" #name);          \
        hold_up(polls);                                            \
        int status = real arguments;                               \
        if (!polls)                                                \
            hold_up(1);                                            \
        return status;                                             \
    }

HELD_UP(Send, 0, (const void *x, int n, Type t, int to, int tag, Comm c), (x, n, t, to, tag, c))
HELD_UP(Recv, 0, (void *y, int n, Type t, int from, int tag, Comm c, void *s), (y, n, t, from, tag, c, s))
HELD_UP(Isend, 0, (const void *x, int n, Type t, int to, int tag, Comm c, void *r), (x, n, t, to, tag, c, r))
HELD_UP(Irecv, 0, (void *y, int n, Type t, int from, int tag, Comm c, void *r), (y, n, t, from, tag, c, r))
HELD_UP(Sendrecv, 0,
        (const void *x, int n, Type t, int to, int tag, void *y, int m, Type u, int from, int other, Comm c, void *s),
        (x, n, t, to, tag, y, m, u, from, other, c, s))
HELD_UP(Allreduce, 0, (const void *x, void *y, int n, Type t, Op op, Comm c), (x, y, n, t, op, c))
HELD_UP(Reduce, 0, (const void *x, void *y, int n, Type t, Op op, int root, Comm c), (x, y, n, t, op, root, c))
HELD_UP(Bcast, 0, (void *x, int n, Type t, int root, Comm c), (x, n, t, root, c))
HELD_UP(Barrier, 0, (Comm c), (c))
HELD_UP(Ibarrier, 0, (Comm c, void *r), (c, r))
HELD_UP(Wait, 0, (void *r, void *s), (r, s))
HELD_UP(Comm_create_group, 0, (Comm c, int group, int tag, void *made), (c, group, tag, made))
HELD_UP(Test, 1, (void *r, void *flag, void *s), (r, flag, s))
HELD_UP(Improbe, 1, (int from, int tag, Comm c, void *flag, void *m, void *s), (from, tag, c, flag, m, s))

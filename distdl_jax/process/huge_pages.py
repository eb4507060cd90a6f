"""Huge pages for large buffers, so that sending one does not start with thousands of page faults.

glibc hands out each large buffer as fresh 4-KiB pages and gives them back when the buffer is freed: a jitted step
that makes a 16 MiB buffer pays 4,096 page faults each time, and MPI's single-copy transport pins as many pages.
Here malloc is told to keep large buffers in its own heap, and the part of the address space that the heap grows into
is marked for transparent huge pages. Nothing is touched, so nothing is used up until the program needs it.
"""

from __future__ import annotations

import ctypes
import os
import sys
import warnings

from distdl_jax.watchdog.status import worker_status

_M_TRIM_THRESHOLD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -4, -8
_MADV_HUGEPAGE = 14
_HUGE_PAGE = 2 * 2**20

_done = False


def prefer_huge_pages(mebibytes: int) -> bool:
    """Set malloc up for large buffers in huge pages, once a process; whether it is set up.

    A no-op but on Linux with glibc. `mebibytes` is the size of the region that is marked; with 0 malloc is left alone.
    Where GLIBC_TUNABLES asks for huge pages, that is left to it. Warns, on one worker, where it comes too late: where a
    thread has a heap of its own already.
    """
    global _done
    size = mebibytes * 2**20
    by_glibc = "glibc.malloc.hugetlb" in os.environ.get("GLIBC_TUNABLES", "")
    if not _done and size and not by_glibc and sys.platform == "linux":
        libc = ctypes.CDLL(None)
        _done = hasattr(libc, "gnu_get_libc_version") and _mark_heap(libc, size)
        if _done and _heaps(libc) > 1 and worker_status().rank == 0:
            warnings.warn(
                "malloc has more than one heap, since MPI or another library started a thread before distdl_jax was "
                "imported. A jitted step that takes more than 64 MiB may then touch fresh memory at each call, and "
                "take up to twice as long. Import distdl_jax before mpi4py, or set MALLOC_ARENA_MAX=1.",
                RuntimeWarning,
                stacklevel=3,
            )
    return _done or by_glibc


def _mark_heap(libc: ctypes.CDLL, size: int) -> bool:
    libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    libc.free.restype, libc.free.argtypes = None, [ctypes.c_void_p]
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    # One heap, never trimmed, and no buffer outside it.
    for option, value in ((_M_MMAP_MAX, 0), (_M_TRIM_THRESHOLD, -1), (_M_ARENA_MAX, 1)):
        if libc.mallopt(option, value) != 1:
            return False
    block = libc.malloc(size)
    if block is None:  # the system grants less address space than that: 4-KiB pages it is
        return False
    start = -(-block // _HUGE_PAGE) * _HUGE_PAGE
    stop = (block + size) // _HUGE_PAGE * _HUGE_PAGE
    marked = stop > start and libc.madvise(start, stop - start, _MADV_HUGEPAGE) == 0
    libc.free(block)
    return bool(marked)


def _heaps(libc: ctypes.CDLL) -> int:
    """How many heaps malloc has: the first, and one for each thread that came before there was to be one alone."""
    libc.open_memstream.restype = ctypes.c_void_p
    libc.malloc_info.argtypes = [ctypes.c_int, ctypes.c_void_p]
    libc.fclose.argtypes = [ctypes.c_void_p]
    text, size = ctypes.c_char_p(), ctypes.c_size_t()
    stream = libc.open_memstream(ctypes.byref(text), ctypes.byref(size))
    if stream is None:
        return 1
    libc.malloc_info(0, stream)
    libc.fclose(stream)
    heaps = (text.value or b"").count(b"<heap nr=")
    libc.free(ctypes.cast(text, ctypes.c_void_p))
    return heaps

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

from distdl_jax.errors import SetupError

_M_TRIM_THRESHOLD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -4, -8
_MADV_HUGEPAGE = 14
_HUGE_PAGE = 2 * 2**20
_DEFAULT_MEBIBYTES = 4096

_done = False


def prefer_huge_pages() -> bool:
    """Set malloc up for large buffers in huge pages, once a process; whether it is set up.

    A no-op but on Linux with glibc. The environment's `DISTDL_JAX_HUGE_PAGES` turns it off (0), or gives the size of
    the region that is marked, in MiB (default 4096). Where GLIBC_TUNABLES asks for huge pages, that is left to it.

    **Raises:** `SetupError` where `DISTDL_JAX_HUGE_PAGES` is not such a number.
    """
    global _done
    size = _mebibytes() * 2**20
    by_glibc = "glibc.malloc.hugetlb" in os.environ.get("GLIBC_TUNABLES", "")
    if not _done and size and not by_glibc and sys.platform == "linux":
        libc = ctypes.CDLL(None)
        _done = hasattr(libc, "gnu_get_libc_version") and _mark_heap(libc, size)
    return _done or by_glibc


def _mebibytes() -> int:
    setting = os.environ.get("DISTDL_JAX_HUGE_PAGES", str(_DEFAULT_MEBIBYTES))
    if not (setting.isascii() and setting.isdigit()):
        raise SetupError(
            f"The environment variable DISTDL_JAX_HUGE_PAGES (={setting!r}) must be a number of MiB, or 0."
        )
    return int(setting)


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

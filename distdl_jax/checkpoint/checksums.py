"""CRC-32, as zlib has it: by the package zlib-ng, which takes a fraction of the time, where that is installed."""

try:
    from zlib_ng.zlib_ng import crc32
except ImportError:
    from zlib import crc32

__all__ = ["checksums", "crc32"]


def checksums(data: memoryview, chunk: int) -> list[int]:
    """Those of each `chunk` bytes, the last of what is left.

    >>> checksums(memoryview(b"123456789abc"), 9) == [0xCBF43926, crc32(b"abc")]
    True
    """
    return [crc32(data[start : start + chunk]) for start in range(0, len(data), chunk)]

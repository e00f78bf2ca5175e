# SPDX-License-Identifier: BSD-3-Clause
"""Calls of the CUDA driver that torch does not offer, for memory given by address.

The driver library is opened at the first call. Callers are workers whose torch has set the CUDA context; addresses say
themselves whether they lie on the host or on a card (unified addressing).
"""

import ctypes
from functools import cache


@cache
def _driver() -> ctypes.CDLL:
    """Raises OSError where there is no NVIDIA driver."""
    library = ctypes.CDLL("libcuda.so.1")
    library.cuMemcpyAsync.argtypes = [ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p]
    library.cuMemsetD32Async.argtypes = [ctypes.c_uint64, ctypes.c_uint, ctypes.c_size_t, ctypes.c_void_p]
    library.cuMemHostGetDevicePointer_v2.argtypes = [ctypes.POINTER(ctypes.c_uint64), ctypes.c_void_p, ctypes.c_uint]
    library.cuGetErrorString.argtypes = [ctypes.c_int, ctypes.POINTER(ctypes.c_char_p)]
    return library


def _check(status: int, what: str) -> None:
    if status:
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(status, ctypes.byref(text))
        raise RuntimeError(f"{what}: {(text.value or b'unknown').decode()} (CUDA driver error {status})")


def copy_async(target: int, source: int, size_bytes: int, stream: int) -> None:
    """Queue a copy between any two addresses on a stream. Raises RuntimeError if the driver refuses."""
    status = _driver().cuMemcpyAsync(target, source, size_bytes, stream)
    _check(status, f"copying {size_bytes} bytes from {source:#x} to {target:#x}")


def clear_async(address: int, words: int, stream: int) -> None:
    """Queue the clearing of 32-bit words of device memory on a stream. Raises RuntimeError if the driver refuses."""
    _check(_driver().cuMemsetD32Async(address, 0, words, stream), f"clearing {4 * words} bytes at {address:#x}")


def device_address(host_address: int) -> int:
    """Where the GPU sees pinned host memory. Raises RuntimeError if it is not pinned."""
    address = ctypes.c_uint64()
    status = _driver().cuMemHostGetDevicePointer_v2(ctypes.byref(address), host_address, 0)
    _check(status, f"device address of host memory {host_address:#x}")
    return address.value

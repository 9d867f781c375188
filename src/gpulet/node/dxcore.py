"""Asks libdxcore, Windows' door into its Linux subsystem, which driver store each display adapter uses.

Structures and numbers are those of Windows' d3dkmthk.h and d3dukmdt.h. Not at hand outside of such a node, and slow to
load: only for nodes where the files alone don't tell.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

_QUERY_REGISTRY = 48  # KMTQAITYPE_QUERYREGISTRY
_DRIVER_STORE_PATH = 2  # D3DDDI_QUERYREGISTRY_DRIVERSTOREPATH
_DONE, _OVERFLOW = 0, 1  # D3DDDI_QUERYREGISTRY_STATUS
_ROOM = 1024  # characters; one more question is asked where a path takes more


class _Adapter(ctypes.Structure):  # D3DKMT_ADAPTERINFO
    _fields_ = [
        ("handle", ctypes.c_uint),
        ("luid_low", ctypes.c_uint),
        ("luid_high", ctypes.c_int),
        ("sources", ctypes.c_uint),
        ("moves_preferred", ctypes.c_uint),
    ]


class _Enumerate(ctypes.Structure):  # D3DKMT_ENUMADAPTERS2
    _fields_ = [("count", ctypes.c_uint), ("adapters", ctypes.POINTER(_Adapter))]


class _Query(ctypes.Structure):  # D3DKMT_QUERYADAPTERINFO
    _fields_ = [
        ("handle", ctypes.c_uint),
        ("type", ctypes.c_int),
        ("data", ctypes.c_void_p),
        ("size", ctypes.c_uint),
    ]


class _Registry(ctypes.Structure):  # D3DDDI_QUERYREGISTRY_INFO; the value stands from `output` on
    _fields_ = [
        ("type", ctypes.c_uint),
        ("flags", ctypes.c_uint),
        ("name", ctypes.c_wchar * 260),
        ("value_type", ctypes.c_uint),
        ("physical_adapter", ctypes.c_uint),
        ("output_size", ctypes.c_uint),
        ("status", ctypes.c_uint),
        ("output", ctypes.c_ulonglong),
    ]


def stores(library: str) -> list[str]:
    """The driver stores of the adapters, each once, in the adapters' order. Empty where the library can't tell.

    library: its path on the host.
    """
    try:
        dx = ctypes.CDLL(library)
        enumerate_adapters, query, close = (
            getattr(dx, name) for name in ("D3DKMTEnumAdapters2", "D3DKMTQueryAdapterInfo", "D3DKMTCloseAdapter")
        )
    except (OSError, AttributeError):  # no library, or one of another time
        return []
    call = _Enumerate()
    if enumerate_adapters(ctypes.byref(call)) != 0 or not call.count:
        return []
    adapters = (_Adapter * call.count)()
    call.adapters = adapters
    if enumerate_adapters(ctypes.byref(call)) != 0:
        return []
    found = list(dict.fromkeys(_store(query, adapter.handle) for adapter in adapters[: call.count]))
    for adapter in adapters[: call.count]:
        close(ctypes.byref(ctypes.c_uint(adapter.handle)))
    return [path for path in found if path]


def _store(query: ctypes._NamedFuncPointer, handle: int) -> str:
    """One adapter's driver store, "" where it isn't told."""
    offset = _Registry.output.offset
    size = offset + _ROOM * ctypes.sizeof(ctypes.c_wchar)
    for _ in range(2):
        data = ctypes.create_string_buffer(size)
        registry = _Registry.from_buffer(data)
        registry.type = _DRIVER_STORE_PATH
        if query(ctypes.byref(_Query(handle, _QUERY_REGISTRY, ctypes.addressof(data), size))) != 0:
            return ""
        if registry.status == _DONE:
            value = data.raw[offset : offset + registry.output_size]
            return "".join(_characters(value)).rstrip("\0")
        if registry.status != _OVERFLOW:
            return ""
        size = offset + registry.output_size
    return ""


def _characters(value: bytes) -> Iterator[str]:
    width = ctypes.sizeof(ctypes.c_wchar)
    codes = (int.from_bytes(value[at : at + width], "little") for at in range(0, len(value), width))
    return (chr(code) for code in codes if code <= 0x10FFFF)

"""libdxcore tells which of several driver stores is used."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from gpulet.node import driver, dxcore
from gpulet.sim import node

pytestmark = pytest.mark.root
STORES = "/usr/lib/wsl/drivers"


def two_stores(folder: Path) -> tuple[Path, str, str]:
    """(driver root, the store that the adapter uses, a newer one)."""
    root = node.create(folder, "wsl").root
    (used,) = [path for path in (root / STORES[1:]).iterdir() if (path / "libcuda.so.1.1").exists()]
    newer = shutil.copytree(used, used.with_name("nv_of_another_gpu"))
    (newer / "libcuda.so.1.1").touch()
    return root, f"{STORES}/{used.name}", f"{STORES}/{newer.name}"


def test_the_store_that_an_adapter_uses_and_not_the_newest(tmp_path: Path) -> None:
    root, used, _newer = two_stores(tmp_path / "n")
    assert dxcore.stores(f"{root}/usr/lib/wsl/lib/libdxcore.so") == [used]
    assert driver.find(str(root)).folders == (used,)


def test_the_newest_where_the_library_cannot_tell(tmp_path: Path) -> None:
    root, _used, newer = two_stores(tmp_path / "n")
    library = root / "usr/lib/wsl/lib/libdxcore.so"
    library.unlink()
    library.write_bytes(b"no library")
    assert dxcore.stores(str(library)) == []
    assert driver.find(str(root)).folders == (newer,)


def test_what_is_no_libdxcore_tells_nothing(tmp_path: Path) -> None:
    assert dxcore.stores(str(tmp_path / "absent")) == []
    assert dxcore.stores("libc.so.6") == []

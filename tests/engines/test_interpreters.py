"""The launchers' interpreter: one that is whole and of our version, the distribution's first."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from gpulet.engines import interpreters, pack

NAME = f"python{sys.version_info.major}.{sys.version_info.minor}"
OURS = (sys.executable, getattr(sys, "_base_executable", ""))


def script(folder: Path, text: str) -> Path:
    path = folder / NAME
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def test_the_distributions_own_comes_first(tmp_path: Path) -> None:
    wrapper = script(tmp_path, f'exec {sys.executable} "$@"')
    path, modules = interpreters.best(tmp_path)
    assert path == str(wrapper)
    assert set(modules) == set(pack.STANDARD)


@pytest.mark.parametrize(
    "text",
    ["exit 1", "echo nonsense", "echo '[\"00\", 0, {}]'", "echo '{}'"],
    ids=["fails", "words", "version", "form"],
)
def test_one_that_will_not_do_is_passed_over(tmp_path: Path, text: str) -> None:
    script(tmp_path, text)
    assert interpreters.best(tmp_path)[0] in OURS


def test_one_that_lacks_a_module_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """As Debian's python3-minimal does."""
    assert interpreters.standard(sys.executable)
    monkeypatch.setattr(interpreters, "STANDARD", ("struct", "no_such_module"))
    assert interpreters.standard(sys.executable) is None


def test_none_in_the_usual_place(tmp_path: Path) -> None:
    assert interpreters.best(tmp_path)[0] in OURS

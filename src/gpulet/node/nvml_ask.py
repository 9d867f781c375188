"""One question to NVML about a GPU: its answer, or what stands for one where there is none to be had."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import pynvml

from gpulet.node.nvml_errors import ABOUT_THE_QUESTION

T = TypeVar("T")


def ask(default: T, function: Callable[..., T], *arguments: object) -> T:
    """The answer, or `default` where this GPU or library doesn't know the question or we may not ask it.

    Any other error is raised: it may be over with the next question, and a GPU that is taken for what the default says
    (whole, though it is partitioned) would be offered as that until then.
    """
    try:
        return function(*arguments)
    except pynvml.NVMLError as error:
        if error.value not in ABOUT_THE_QUESTION:
            raise
        return default


def text(value: Any) -> str:
    """A string of NVML's, which nvidia-ml-py gives as bytes or as text."""
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)

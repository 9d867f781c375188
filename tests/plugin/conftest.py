"""The kubelet of the plugin's tests, and the folder with its socket."""

from __future__ import annotations

import pytest

from gpulet.sim.kubelet import Kubelet
from support import plugin_process as plugin


@pytest.fixture
def folder():
    with plugin.short_folder() as folder:
        yield folder


@pytest.fixture
def kubelet(folder):
    with Kubelet(folder) as kubelet:
        yield kubelet

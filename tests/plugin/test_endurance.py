"""A thousand kubelet restarts, and SIGKILL at random moments: what must not grow or get lost."""

from __future__ import annotations

import os
import random
import threading
import time

from gpulet.plugin import kubelet as agent
from gpulet.sim.kubelet import Kubelet
from support import plugin_process as plugin
from support.hand_made import facts

GPU = "nvidia.com/gpu"


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_a_thousand_kubelet_restarts(monkeypatch):
    monkeypatch.setattr(agent, "LOOK_EVERY", 0.005)  # the same decisions, twenty times as fast
    chance = random.Random(1)
    with (
        plugin.short_folder() as folder,
        Kubelet(folder) as kubelet,
        plugin.running(folder, lambda: facts(4)) as running,
    ):
        kubelet.wait_for(GPU, 4)
        for restart in range(1, 1001):
            time.sleep(chance.random() * 0.01)
            kubelet.restart()
            plugin.until(lambda: len(kubelet.registrations) > restart)  # noqa: B023
            if restart == 100:  # warmed up
                threads, files = threading.active_count(), descriptors()
        kubelet.wait_for(GPU, 4)
        time.sleep(0.2)
        assert len(kubelet.registrations) == 1001
        assert running.daemon.agents[GPU].streams == 1
        assert threading.active_count() <= threads + 4
        assert descriptors() <= files + 20  # sockets that are just closing
        assert sorted(path.name for path in folder.glob("*.sock")) == ["kubelet.sock", "nvidia-gpu.sock"]


def test_restarts_faster_than_it_can_follow(monkeypatch):
    chance = random.Random(2)
    with plugin.short_folder() as folder, Kubelet(folder) as kubelet, plugin.running(folder, lambda: facts(4)):
        for _ in range(50):
            time.sleep(chance.random() * 0.1)
            kubelet.restart()
        kubelet.wait_for(GPU, 4)
        assert len(kubelet.registrations) <= 52


def test_killed_at_random_moments():
    chance = random.Random(3)
    with plugin.short_folder() as folder, Kubelet(folder) as kubelet:
        for _ in range(10):
            process = plugin.start_process(folder)
            time.sleep(chance.random() * 0.25)
            process.kill()
            process.wait()
        process = plugin.start_process(folder)
        try:
            kubelet.wait_for(GPU, 8)
            kubelet.allocate("p", "c", {GPU: 8})
        finally:
            process.terminate()
            assert process.wait(10) == 0
        assert not [name for name in os.listdir(folder) if "nvidia" in name]

"""The runtime's counts in the plugin's metrics."""

from __future__ import annotations

from gpulet.injection import tally
from gpulet.sim.kubelet import Kubelet
from support import plugin_process as plugin
from support.hand_made import facts

GPU = "nvidia.com/gpu"


def test_what_the_runtime_counted_is_told_and_goes_on_over_a_restart(monkeypatch):
    with plugin.short_folder() as folder, Kubelet(folder) as kubelet:
        runtime = str(folder / "runtime")
        words = ("--metrics-address=127.0.0.1:0", f"--runtime-state-dir={runtime}")

        def told(running):
            lines = plugin.get(running.endpoint.port, "/metrics")[1].splitlines()
            return {line for line in lines if line.startswith("runtime_inject")}

        with plugin.running(folder, lambda: facts(1), *words) as running:
            kubelet.wait_for(GPU, 1)
            assert told(running) == set()
            tally.add(runtime, "jit-cdi", "ok", 0.004)
            tally.add(runtime, "jit-cdi", "ok", 0.008)
            tally.add(runtime, "auto", "refused", 0.002)
            first = told(running)
            assert {
                'runtime_inject_total{mode="jit-cdi",result="ok"} 2.0',
                'runtime_inject_total{mode="auto",result="refused"} 1.0',
                'runtime_inject_duration_seconds_bucket{le="0.001",mode="jit-cdi",result="ok"} 0.0',
                'runtime_inject_duration_seconds_bucket{le="0.005",mode="jit-cdi",result="ok"} 1.0',
                'runtime_inject_duration_seconds_bucket{le="0.01",mode="jit-cdi",result="ok"} 2.0',
                'runtime_inject_duration_seconds_bucket{le="+Inf",mode="jit-cdi",result="ok"} 2.0',
                'runtime_inject_duration_seconds_count{mode="jit-cdi",result="ok"} 2.0',
                'runtime_inject_duration_seconds_sum{mode="jit-cdi",result="ok"} 0.012',
            } <= first
        kubelet.wait_for(GPU, 0)
        monkeypatch.setattr(tally, "MOST", 1)
        tally.add(runtime, "jit-cdi", "ok", 3.0)  # and the file is folded
        with plugin.running(folder, lambda: facts(1), *words) as running:
            kubelet.wait_for(GPU, 1)
            assert 'runtime_inject_total{mode="jit-cdi",result="ok"} 3.0' in told(running)
            (folder / "runtime" / tally.NAME).unlink()
            (folder / "runtime" / tally.NAME).mkdir()
            assert told(running) == set()

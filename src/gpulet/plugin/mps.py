"""MPS on the plugin's side: a resource shared through MPS is offered once its control daemon answers."""

from __future__ import annotations

import asyncio
import os
import shutil

from gpulet.errors import ConfigError
from gpulet.plugin.config import Config
from gpulet.plugin.resources import Resource

PROGRAM = "nvidia-cuda-mps-control"
MOUNTED = "/mps"  # where a container of the plugin has the host's MPS folder
ANSWER_TIMEOUT = 5.0  # seconds; a control process that hangs must not hold up anything else
CLIENTS, CLIENTS_BEFORE_VOLTA = 48, 16  # how many clients one GPU takes (MPS documentation)


def check(resources: tuple[Resource, ...]) -> None:
    """Raises ConfigError where a GPU would get more replicas than MPS takes clients."""
    for resource in resources:
        for device in resource.devices:
            major = device.arch.partition(".")[0]
            most = CLIENTS if major.isdigit() and int(major) >= 7 else CLIENTS_BEFORE_VOLTA
            if device.replicas > most:
                raise ConfigError(
                    "invalid MPS configuration: invalid device maximum allowed replicas exceeded",
                    seen=f"{device.replicas} > {most} on GPU {device.index}",
                    remedy=f"lower the replicas of {resource.name}",
                )


async def problem(resource: str, config: Config) -> str:
    """ "" where the resource's control daemon answers, else what to wait for."""
    root = MOUNTED if os.path.isdir(MOUNTED) else config.mps_root
    pipe, log = (os.path.join(root, resource, name) for name in ("pipe", "log"))
    if not os.path.isdir(pipe):
        return f"waiting for the MPS daemon at {pipe}: the folder isn't there"
    inside = os.path.join(config.lookup_root, "usr/bin")
    program = shutil.which(PROGRAM, path=os.pathsep.join([inside, os.environ.get("PATH", os.defpath)]))
    if program is None:
        return f"{PROGRAM} is neither in {inside} nor in PATH"
    environ = {"CUDA_MPS_PIPE_DIRECTORY": pipe, "CUDA_MPS_LOG_DIRECTORY": log}
    process = await asyncio.create_subprocess_exec(
        program, env=environ, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    try:
        output, _ = await asyncio.wait_for(process.communicate(b"get_default_active_thread_percentage"), ANSWER_TIMEOUT)
    except TimeoutError:
        process.kill()
        await process.wait()
        return f"waiting for the MPS daemon at {pipe}: no answer within {ANSWER_TIMEOUT:g} s"
    if process.returncode:
        words = " ".join(output.decode(errors="replace").split())
        return f"waiting for the MPS daemon at {pipe}: {PROGRAM} ended with {process.returncode}: {words}"
    return ""

"""MPS on the plugin's side: a resource shared through MPS is offered while its control daemon answers, with its limits.

Who starts the control daemons is mps_daemon.py, a program of its own: they must outlive the plugin.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal

from gpulet.errors import ConfigError
from gpulet.plugin.config import Config
from gpulet.plugin.resources import Resource

PROGRAM = "nvidia-cuda-mps-control"
MOUNTED = "/mps"  # where a container of the plugin has the host's MPS folder
QUESTION = "get_default_active_thread_percentage"
CONTROL, STARTED, HELD = "control", ".started", ".held"  # see mps_daemon.py
ANSWER_TIMEOUT = 5.0  # seconds; a control process that hangs must not hold up anything else
KILL_TIMEOUT = 1.0  # seconds; one that hangs in the driver dies later
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


def shared(resource: Resource, config: Config) -> bool:
    """Whether an MPS control daemon serves this resource."""
    return config.mps_active and any(device.replicas for device in resource.devices)


def folder(config: Config) -> str:
    """The folder of all MPS files, as this process sees it."""
    return MOUNTED if os.path.isdir(MOUNTED) else config.mps_root


def started(resource: str, config: Config) -> str:
    """The file that is there while a resource's control daemon has been told its limits."""
    return os.path.join(folder(config), resource, STARTED)


def find_program(name: str, config: Config) -> tuple[str | None, str]:
    """(path or None, where it was looked for): beneath the driver root before PATH."""
    inside = os.path.join(config.lookup_root, "usr/bin")
    path = shutil.which(name, path=os.pathsep.join([inside, os.environ.get("PATH", os.defpath)]))
    return path, f"{inside} nor in PATH"


def environment(resource: str, config: Config) -> dict[str, str]:
    """All that a control process gets: the two folders that make it this resource's, and beneath another root the
    driver's libraries."""
    root = folder(config)
    environ = {
        "CUDA_MPS_PIPE_DIRECTORY": os.path.join(root, resource, "pipe"),
        "CUDA_MPS_LOG_DIRECTORY": os.path.join(root, resource, "log"),
    }
    if config.lookup_root != "/":
        triplet = f"usr/lib/{os.uname().machine}-linux-gnu"
        folders = [os.path.join(config.lookup_root, name) for name in (triplet, "usr/lib64", "usr/lib")]
        environ["LD_LIBRARY_PATH"] = os.pathsep.join(filter(os.path.isdir, folders))
    return environ


async def problem(resource: str, config: Config) -> str:
    """ "" where the resource's control daemon answers, else what to wait for."""
    environ = environment(resource, config)
    pipe = environ["CUDA_MPS_PIPE_DIRECTORY"]
    waiting = f"waiting for the MPS daemon at {pipe}"
    if not os.path.isdir(pipe):
        return f"{waiting}: the folder isn't there"
    program, where = find_program(PROGRAM, config)
    if program is None:
        return f"{PROGRAM} is neither in {where}"
    try:
        process = await asyncio.create_subprocess_exec(
            program, env=environ, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
    except OSError as error:
        return f"{waiting}: {program} can't be run: {error.strerror}"
    output = None
    try:
        async with asyncio.timeout(ANSWER_TIMEOUT):
            output, _ = await process.communicate(QUESTION.encode())
    except TimeoutError:
        return f"{waiting}: no answer within {ANSWER_TIMEOUT:g} s"
    finally:
        if output is None:  # also where we are to end meanwhile, or what it has started holds our pipes when it is gone
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(KILL_TIMEOUT):
                    await process.communicate()  # also to the end of the pipes
    if process.returncode:
        words = " ".join(output.decode(errors="replace").split())
        return f"{waiting}: {PROGRAM} ended with {process.returncode}: {words}"
    mark = started(resource, config)
    if not os.path.exists(mark):  # the peer's mps-control-daemon makes it too
        return f"{waiting}: it answers and has no limits yet: no {mark}; the log of mps-control-daemon says why"
    return ""

"""The runtimes that stand against each other: bare, ours in each mode, a peer's where one is named."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from bench.peers import Peers
from bench.site import LOW_LEVEL, SETTLED, Runtime, Site
from gpulet.errors import EngineError
from gpulet.injection import cdi
from gpulet.injection.cdi_calls import HookCalls
from gpulet.node import driver, procfs

ASKED = "NVIDIA_VISIBLE_DEVICES=0,1"
ALL = "all"
SOME = "compute,utility"
SAME = "all but compat32"  # in words; the peer's CDI modes know no 32-bit libraries, so these are its mounts
MEANT = {SAME: "compute,display,graphics,ngx,utility,video"}

NO_SANDBOXUTILS = "disable-nvsandboxutils"  # the simulated node has that library's file and none of its functions

CONFIG = """
[nvidia-container-cli]
root = "{root}"
path = "{cli}"
[nvidia-container-runtime]
mode = "{mode}"
runtimes = ["{low}"]
[nvidia-container-runtime.modes.cdi]
spec-dirs = ["{specs}"]
[nvidia-container-runtime.modes.jit-cdi]
nvcdi-feature-flags = ["{flag}"]
[nvidia-container-runtime-hook]
path = "{hook}"
skip-mode-detection = true
[nvidia-ctk]
path = "{ctk}"
[gpulet]
state-dir = "{state}"
"""


@dataclass(frozen=True)
class Contender:
    """A runtime as it is measured. maker: "bare", "gpulet" or "peer"; mode: "jit-cdi", "cdi", "legacy" or ""; form: how
    the CDI specification is written; capabilities: what the image asks for; prefork: whether gpulet-prefork runs."""

    maker: str
    mode: str = ""
    form: str = ""
    capabilities: str = ""
    prefork: bool = False

    @property
    def name(self) -> str:
        """The contender in words."""
        return " ".join(
            filter(None, (self.maker, "prefork" if self.prefork else "", self.mode, self.form, self.capabilities))
        )


BARE = Contender("bare")
OURS = tuple(
    Contender("gpulet", mode, form, capabilities)
    for mode, form in (("jit-cdi", ""), ("cdi", "JSON"), ("cdi", "YAML"), ("legacy", ""))
    for capabilities in ((ALL, SAME, SOME) if mode == "jit-cdi" else (ALL, SOME))
)


PREFORKED = tuple(replace(one, prefork=True) for one in OURS if one.mode == "jit-cdi" or one.form == "JSON")


def contenders(peers: Peers) -> list[Contender]:
    """Everyone who can run here; what the peer lacks a part for is left out (see `lacking`)."""
    found = [BARE, *OURS, *PREFORKED]
    if peers.runtime and peers.ctk:
        found.append(Contender("peer", "jit-cdi", "", ALL))
        if peers.cdi_hook:
            found.append(Contender("peer", "cdi", "YAML", ALL))
            both = [(capabilities, prefork) for prefork in (False, True) for capabilities in (ALL, SOME)]
            found += [Contender("gpulet", "cdi", "peer's YAML", *one) for one in both]
    if peers.runtime and peers.hook and peers.container_cli:
        found += [Contender("peer", "legacy", "", capabilities) for capabilities in (ALL, SOME)]
    return found


def lacking(peers: Peers) -> list[str]:
    """What isn't measured, and what would bring it in."""
    if not peers.runtime:
        return ["no peer: PEER_RUNTIME with PEER_CTK and PEER_CDI_HOOK (and PEER_HOOK, PEER_CONTAINER_CLI) names one"]
    wanted = {
        "jit-cdi": {"PEER_CTK": peers.ctk},
        "cdi": {"PEER_CTK": peers.ctk, "PEER_CDI_HOOK": peers.cdi_hook},
        "legacy": {"PEER_HOOK": peers.hook, "PEER_CONTAINER_CLI": peers.container_cli},
    }
    missing = {mode: [name for name, path in parts.items() if not path] for mode, parts in wanted.items()}
    return [f"no peer in mode {mode}: it also wants {', '.join(names)}" for mode, names in missing.items() if names]


def runtimes(site: Site, peers: Peers, chosen: Sequence[Contender]) -> dict[str, Runtime]:
    """The contenders set up on a site: name -> what an engine is to call."""
    ready = {contender.name: _runtime(site, peers, contender) for contender in chosen}
    time.sleep(SETTLED)
    return ready


def _runtime(site: Site, peers: Peers, one: Contender) -> Runtime:
    env = (ASKED, f"NVIDIA_DRIVER_CAPABILITIES={MEANT.get(one.capabilities, one.capabilities or ALL)}")
    if one.maker == "bare":
        return Runtime(one.name, LOW_LEVEL, {}, env)
    ours = one.maker == "gpulet"
    launchers = site.preforked() if one.prefork else site.launchers
    text = CONFIG.format(
        root=site.node.root,
        mode=one.mode,
        flag=NO_SANDBOXUTILS,
        low=LOW_LEVEL,
        cli=launchers["gpulet-container-cli"] if ours else peers.container_cli,
        hook=launchers["gpulet-hook"] if ours else peers.hook,
        ctk=peers.ctk or "nvidia-ctk",
        specs=_specs(site, peers, one.form if ours else f"peer's {one.form}") if one.form else site.folder / "none",
        state=site.folder / "run",
    )
    program = str(launchers["gpulet-runtime"]) if ours else peers.runtime
    return Runtime(one.name, program, site.config(one.name.replace(" ", "-"), text), env)


def _specs(site: Site, peers: Peers, form: str) -> Path:
    """A folder with this node's CDI specification, written once."""
    folder = site.folder / "cdi" / form.replace(" ", "-")
    if folder.exists():
        return folder
    if form.startswith("peer"):
        _peers_spec(site, peers, folder)
    else:
        facts = procfs.facts(str(site.node.root))
        files = driver.find(str(site.node.root), version=facts.driver)
        made = cdi.make_spec(facts, files, calls=HookCalls(str(site.launchers["gpulet-cdi-hook"])))
        cdi.write_spec(made, str(folder / f"nvidia.{form.lower()}"))
    return folder


def _peers_spec(site: Site, peers: Peers, folder: Path) -> None:
    folder.mkdir(parents=True)
    command = [peers.ctk, "cdi", "generate", "--mode=nvml", f"--driver-root={site.node.root}"]
    command += [
        f"--feature-flag={NO_SANDBOXUTILS}",
        f"--nvidia-cdi-hook-path={peers.cdi_hook}",
        f"--output={folder}/nvidia.yaml",
    ]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode:
        raise EngineError("PEER_CTK wrote no CDI specification", seen=done.stderr.strip().splitlines()[-1:])

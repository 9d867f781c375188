"""Pods from any manifest a user has: the part of the API server that matters between a file and the scheduler."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from gpulet.errors import ConfigError
from gpulet.sim.quantity import parse_quantity

TEMPLATED = ("Deployment", "Job", "DaemonSet", "ReplicaSet", "ReplicationController", "StatefulSet")
_NAMESPACE = uuid.UUID("6f0f4c6e-6f2a-4c43-9f4e-0f0d8f6f3a55")  # any fixed one: uids are the same in every run


@dataclass(frozen=True)
class ContainerSpec:
    """A container as far as this project cares. limits, requests: extended resources in whole numbers, cpu in
    thousandths of a core, memory and storage in bytes; notes: what of the manifest was passed over."""

    name: str
    image: str = ""
    command: tuple[str, ...] = ()
    args: tuple[str, ...] = ()
    env: tuple[tuple[str, str], ...] = ()
    limits: Mapping[str, int] = field(default_factory=dict)
    requests: Mapping[str, int] = field(default_factory=dict)
    privileged: bool = False
    run_as_user: int | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Pod:
    """A Pod as far as this project cares. tolerations: as in the manifest."""

    name: str
    containers: tuple[ContainerSpec, ...] = ()
    init_containers: tuple[ContainerSpec, ...] = ()
    namespace: str = "default"
    uid: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    annotations: Mapping[str, str] = field(default_factory=dict)
    node_selector: Mapping[str, str] = field(default_factory=dict)
    runtime_class: str = ""
    restart_policy: str = "Always"
    tolerations: tuple[Mapping[str, Any], ...] = ()

    def requests(self) -> dict[str, int]:
        """What the scheduler counts: the sum of the containers, or the largest init container where that is more."""
        total: dict[str, int] = {}
        for container in self.containers:
            for name, amount in container.requests.items():
                total[name] = total.get(name, 0) + amount
        for container in self.init_containers:
            for name, amount in container.requests.items():
                total[name] = max(total.get(name, 0), amount)
        return total


def load(path: Path) -> list[Pod]:
    """The Pods of a manifest: documents of kind Pod or List, and the templates of what makes Pods (replicas too).

    Raises ConfigError naming the file and the document.
    """
    try:
        documents = list(yaml.safe_load_all(Path(path).read_text(encoding="utf-8")))
    except OSError as error:
        raise ConfigError(f"manifest {path} can't be read", seen=error.strerror) from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"manifest {path} is no YAML", seen=error) from error
    pods = [
        pod
        for number, document in enumerate(documents, start=1)
        if document is not None
        for pod in _pods(document, f"{path}, document {number}")
    ]
    if not pods:
        raise ConfigError(f"manifest {path} holds no Pod", wanted=f"Pod, List, {', '.join(TEMPLATED)}")
    return pods


def _pods(document: Any, where: str) -> Iterator[Pod]:
    manifest = _map(document, where)
    kind = manifest.get("kind")
    if kind == "Pod":
        yield _pod(manifest, where)
    elif isinstance(kind, str) and kind.endswith("List") and "items" in manifest:
        for number, item in enumerate(_items(manifest, "items", where), start=1):
            yield from _pods(item, f"{where}, item {number}")
    elif kind == "CronJob":
        job = _map(_map(manifest.get("spec"), f"{where}: spec").get("jobTemplate"), f"{where}: spec.jobTemplate")
        yield from _templated({**job, "metadata": manifest.get("metadata")}, where)
    elif kind in TEMPLATED:
        yield from _templated(manifest, where)
    else:
        raise ConfigError(f"{where}: kind", seen=kind, wanted=f"Pod, List, CronJob, {', '.join(TEMPLATED)}")


def _templated(manifest: Mapping[str, Any], where: str) -> Iterator[Pod]:
    """The Pods that a controller would make, with names that say which is which instead of random ones."""
    owner = _map(manifest.get("metadata"), f"{where}: metadata")
    spec = _map(manifest.get("spec"), f"{where}: spec")
    template = _map(spec.get("template"), f"{where}: spec.template")
    metadata = _map(template.get("metadata") or {}, f"{where}: spec.template.metadata")
    count = spec.get("replicas", spec.get("parallelism", 1))
    if not isinstance(count, int) or isinstance(count, bool) or count < 0:
        raise ConfigError(f"{where}: spec.replicas", seen=repr(count), wanted="a whole number")
    for number in range(count):
        named = {"namespace": owner.get("namespace", "default"), **metadata, "name": f"{owner.get('name')}-{number}"}
        yield _pod({"metadata": named, "spec": template.get("spec")}, where)


def _pod(manifest: Mapping[str, Any], where: str) -> Pod:
    metadata = _map(manifest.get("metadata"), f"{where}: metadata")
    name = str(metadata.get("name") or metadata.get("generateName", "").rstrip("-"))
    if not name:
        raise ConfigError(f"{where}: metadata.name", seen="nothing", wanted="a name")
    where = f"{where}, Pod {name}"
    namespace = str(metadata.get("namespace") or "default")
    spec = _map(manifest.get("spec"), f"{where}: spec")
    made = str(uuid.uuid5(_NAMESPACE, f"{namespace}/{name}"))
    known = {
        "metadata.name": name,
        "metadata.namespace": namespace,
        "metadata.uid": str(metadata.get("uid") or made),
        "spec.serviceAccountName": str(spec.get("serviceAccountName") or "default"),
    }
    for key in ("labels", "annotations"):
        known |= {f"metadata.{key}['{item}']": value for item, value in _texts(metadata, key, where).items()}
    user = _map(spec.get("securityContext") or {}, f"{where}: spec.securityContext").get("runAsUser")
    containers = tuple(_container(item, where, known, user) for item in _items(spec, "containers", where))
    inits = tuple(_container(item, where, known, user) for item in _items(spec, "initContainers", where))
    names = [container.name for container in (*inits, *containers)]
    if not containers:
        raise ConfigError(f"{where}: spec.containers", seen="none", wanted="at least one container")
    if len(set(names)) != len(names):
        raise ConfigError(f"{where}: spec.containers", seen=f"names {', '.join(names)}", wanted="each name once")
    return Pod(
        name,
        containers,
        inits,
        namespace,
        known["metadata.uid"],
        _texts(metadata, "labels", where),
        _texts(metadata, "annotations", where),
        _texts(spec, "nodeSelector", where),
        str(spec.get("runtimeClassName") or ""),
        str(spec.get("restartPolicy") or "Always"),
        tuple(_map(item, f"{where}: spec.tolerations") for item in _items(spec, "tolerations", where)),
    )


def _container(item: Any, where: str, known: Mapping[str, str], pod_user: Any) -> ContainerSpec:
    spec = _map(item, f"{where}: a container")
    name = spec.get("name")
    if not isinstance(name, str) or not name:
        raise ConfigError(f"{where}: a container's name", seen=repr(name), wanted="a name")
    where = f"{where}, container {name}"
    context = _map(spec.get("securityContext") or {}, f"{where}: securityContext")
    env, notes = _environment(spec, where, known)
    limits, requests = _resources(spec, where)
    return ContainerSpec(
        name,
        str(spec.get("image") or ""),
        tuple(str(word) for word in _items(spec, "command", where)),
        tuple(str(word) for word in _items(spec, "args", where)),
        env,
        limits,
        requests,
        bool(context.get("privileged", False)),
        context.get("runAsUser", pod_user),
        notes,
    )


def _environment(
    spec: Mapping[str, Any], where: str, known: Mapping[str, str]
) -> tuple[tuple[tuple[str, str], ...], tuple[str, ...]]:
    env: list[tuple[str, str]] = []
    notes: list[str] = []
    for item in _items(spec, "env", where):
        entry = _map(item, f"{where}: env")
        if not entry.get("name"):
            raise ConfigError(f"{where}: env", seen=repr(item), wanted="a name and a value")
        name, value, source = str(entry["name"]), entry.get("value", ""), entry.get("valueFrom")
        if source is None:
            if not isinstance(value, str) and value is not None:
                raise ConfigError(f"{where}: value of {name}", seen=repr(value), wanted="a string (put it in quotes)")
            env.append((name, value or ""))
            continue
        path = _map(_map(source, f"{where}: env {name}").get("fieldRef") or {}, where).get("fieldPath")
        if isinstance(path, str) and path in known:
            env.append((name, known[path]))
        else:
            notes.append(f"env {name} comes from {path or ', '.join(source)}, which isn't known here: left out")
    return tuple(env), tuple(notes)


def _resources(spec: Mapping[str, Any], where: str) -> tuple[dict[str, int], dict[str, int]]:
    """Limits and requests as the API server takes them: a limit implies a request; an extended resource is a whole
    number, with the two equal."""
    section = _map(spec.get("resources") or {}, f"{where}: resources")
    amounts: list[dict[str, int]] = []
    for part in ("limits", "requests"):
        texts = _map(section.get(part) or {}, f"{where}: resources.{part}")
        amounts.append({str(name): parse_quantity(name, text, f"{where}: {part}") for name, text in texts.items()})
    limits, given = amounts
    for name in {**limits, **given}:
        if "/" in name and given.get(name, limits.get(name)) != limits.get(name):
            raise ConfigError(f"{where}: requests of {name}", seen=given[name],
                              wanted=f"equal to limits, {limits.get(name, 'which must be set')}")  # fmt: skip
    return limits, {**limits, **given}


def _map(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ConfigError(where, seen=repr(value), wanted="a map")
    return value


def _items(spec: Mapping[str, Any], key: str, where: str) -> list[Any]:
    value = spec.get(key) or []
    if not isinstance(value, list):
        raise ConfigError(f"{where}: {key}", seen=repr(value), wanted="a list")
    return value


def _texts(spec: Mapping[str, Any], key: str, where: str) -> dict[str, str]:
    return {str(name): str(value) for name, value in _map(spec.get(key) or {}, f"{where}: {key}").items()}

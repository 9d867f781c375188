"""Pods from any manifest a user has: the part of the API server that matters between a file and the scheduler.

A manifest is untrusted: what it says ends up in paths, cgroup names and on terminals. So it is read within bounds
(`pods_yaml`), held to the API server's rules (`pods_spec`, `pods_names`), and echoed cut and escaped (`pods_fields`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from gpulet.codec import read_standard_input
from gpulet.errors import ConfigError
from gpulet.sim import pods_schema as schema
from gpulet.sim.pods_fields import Budget, Field, printable
from gpulet.sim.pods_model import ContainerSpec, Pod
from gpulet.sim.pods_spec import make_pod, own_name, own_namespace
from gpulet.sim.pods_yaml import documents

__all__ = ["TEMPLATED", "ContainerSpec", "Pod", "check_unique", "load", "load_all", "load_with_notes"]

LARGEST = 3 << 20  # bytes of a file: what the API server takes in one request
MOST_NOTED = 20
TEMPLATED = {
    "Deployment": "apps/",
    "Job": "batch/",
    "DaemonSet": "apps/",
    "ReplicaSet": "apps/",
    "ReplicationController": "v1",
    "StatefulSet": "apps/",
}  # kind -> how its apiVersion begins; others have kinds of the same names
WANTED = f"Pod, List, CronJob, {', '.join(TEMPLATED)}"


def load(path: Path) -> list[Pod]:
    """The Pods of a manifest: documents of kind Pod or List, and the templates of what makes Pods (replicas too).

    "-" is standard input. Raises ConfigError naming the file, the document and the field.
    """
    return load_with_notes(path)[0]


def load_with_notes(path: Path) -> tuple[list[Pod], list[str]]:
    """As `load`, and what of the file was passed over. What of each Pod was, stands in its own notes."""
    return load_all([path])


def load_all(paths: Sequence[Path]) -> tuple[list[Pod], list[str]]:
    """As `load_with_notes`, for several files whose Pods are to live side by side."""
    pods: list[Pod] = []
    notes: list[str] = []
    for path in paths:
        reading = _Reading(path)
        reading.read()
        pods += reading.pods
        notes += reading.notes
    check_unique(pods)
    return pods, notes


def check_unique(pods: Iterable[Pod]) -> None:
    """Raises ConfigError where two Pods have the same namespace and name, or the same uid."""
    taken: set[tuple[str, str]] = set()
    uids: dict[str, str] = {}
    for pod in pods:
        if (pod.namespace, pod.name) in taken:
            raise ConfigError(f'pods "{pod.name}" already exists', seen=f"namespace {pod.namespace}",
                              wanted="each name once")  # fmt: skip
        if pod.uid in uids:
            raise ConfigError(f'pods "{pod.name}": metadata.uid', seen=f"{pod.uid}, which is that of {uids[pod.uid]}",
                              wanted="each uid once", remedy="leave it out")  # fmt: skip
        taken.add((pod.namespace, pod.name))
        uids[pod.uid] = pod.name


class _Reading:
    """One file on its way to Pods."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._where = "standard input" if str(path) == "-" else printable(str(path), 300)
        self._budget = Budget()
        self._owners: set[tuple[str, str, str]] = set()
        self._names: set[tuple[str, str]] = set()
        self._other: list[str] = []
        self.pods: list[Pod] = []

    def read(self) -> None:
        try:
            for number, document in enumerate(documents(self._bytes(), self._where, self._budget), start=1):
                if document is not None:
                    self._object(Field(document, f"{self._where}, document {number}", budget=self._budget))
        except ConfigError as error:
            if not error.what.startswith(self._where):  # the budget doesn't know whose it is
                error = ConfigError(f"{self._where}: {error.what}", wanted=error.wanted)
            raise error from error.__cause__
        if not self.pods:
            raise ConfigError(f"manifest {self._where} holds no Pod", seen=_some(self._other, 5), wanted=WANTED)

    @property
    def notes(self) -> list[str]:
        return [f"{self._where}: passed over: {_some(self._other, MOST_NOTED)}"] if self._other else []

    def _bytes(self) -> bytes:
        try:
            if str(self._path) == "-":
                data = read_standard_input(LARGEST + 1)
            else:
                with Path(self._path).open("rb") as file:
                    data = file.read(LARGEST + 1)
        except OSError as error:
            raise ConfigError(f"{self._where} can't be read", seen=error.strerror) from error
        if len(data) > LARGEST:
            raise ConfigError(f"{self._where} is too large", wanted=f"at most {LARGEST >> 20} MiB")
        return data

    def _object(self, manifest: Field, kind: str = "", version: str = "") -> None:
        """One object. kind, version: what it is where it doesn't say so, as the items of a PodList."""
        kind = manifest["kind"].text(kind)
        version = manifest["apiVersion"].text(version)
        if not kind:
            raise manifest["kind"].wrong(WANTED)
        if not version:
            raise manifest["apiVersion"].wrong("the kind's, such as v1 for a Pod")
        item_kind = kind.removesuffix("List")
        if kind != item_kind and manifest["items"].given and item_kind in ("", "Pod", "CronJob", *TEMPLATED):
            for item in manifest["items"].items():
                self._object(item, item_kind, version if item_kind else "")
        elif (kind, version) == ("Pod", "v1"):
            manifest.known(schema.OBJECT)
            if not manifest["metadata"].given:
                raise manifest["metadata"].wrong("a map with the Pod's name")
            self._add(make_pod(manifest["metadata"], manifest["spec"]))
        elif kind == "CronJob" and version.startswith("batch/"):
            self._templated(kind, manifest, manifest["spec"]["jobTemplate"]["spec"])
        elif kind in TEMPLATED and version.startswith(TEMPLATED[kind]):
            self._templated(kind, manifest, manifest["spec"])
        else:
            self._pass_over(manifest, kind, version)

    def _pass_over(self, manifest: Field, kind: str, version: str) -> None:
        metadata = manifest["metadata"].value
        name = metadata.get("name") if isinstance(metadata, dict) else None
        self._other.append(printable(f"{kind} {name if isinstance(name, str) else ''}".strip(), 60)
                           + f" ({printable(version, 40)})")  # fmt: skip

    def _templated(self, kind: str, manifest: Field, spec: Field) -> None:
        """The Pods that a controller would make, with names that say which is which instead of random ones."""
        owner, namespace = own_name(manifest["metadata"]), own_namespace(manifest["metadata"])
        if (kind, namespace, owner) in self._owners:
            raise manifest["metadata"]["name"].wrong("each name once", seen=f'{kind} "{owner}" already exists')
        self._owners.add((kind, namespace, owner))
        template = spec["template"]
        if not template["spec"].given:
            raise template["spec"].wrong("a Pod's spec")
        _check_restart(kind, template["spec"]["restartPolicy"])
        count = _count(kind, spec)
        self._budget.take(max(0, count - 1) * template.cost())
        if not count:
            self._other.append(f"{kind} {owner} (no replicas)")
        for number in range(count):
            name = _numbered(owner, f"{number}")
            if (namespace, name) in self._names:  # two controllers of different kinds may share a name
                name = _numbered(owner, f"{kind.lower()}-{number}")
            self._add(make_pod(template["metadata"], template["spec"], name=name, namespace=namespace))

    def _add(self, pod: Pod) -> None:
        self._names.add((pod.namespace, pod.name))
        self.pods.append(pod)


def _count(kind: str, spec: Field) -> int:
    """How many Pods run at once."""
    if kind == "DaemonSet":
        return 1
    if kind not in ("Job", "CronJob"):
        replicas = spec["replicas"].whole()
        return 1 if replicas is None else replicas
    parallel, completions = spec["parallelism"].whole(), spec["completions"].whole()
    if spec["suspend"].flag():
        return 0
    parallel = 1 if parallel is None else parallel
    return parallel if completions is None else min(parallel, completions)


def _check_restart(kind: str, policy: Field) -> None:
    """Jobs end, other controllers' Pods don't: the API server holds them to it."""
    if kind in ("Job", "CronJob"):
        if policy.text() not in ("OnFailure", "Never"):
            raise policy.wrong(f"OnFailure or Never in a {kind}")
    elif policy.text() not in ("", "Always"):
        raise policy.wrong(f"Always in a {kind}")


def _numbered(owner: str, suffix: str) -> str:
    """The owner's name and a suffix, within what a name may have."""
    return f"{owner[: 252 - len(suffix)].rstrip('-.')}-{suffix}"


def _some(found: Sequence[str], most: int) -> str | None:
    if not found:
        return None
    more = f" and {len(found) - most} more" if len(found) > most else ""
    return ", ".join(found[:most]) + more

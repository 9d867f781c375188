from __future__ import annotations

import io
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from gpulet.errors import ConfigError
from gpulet.sim.pods import ContainerSpec, Pod, check_unique, load, load_all, load_with_notes
from gpulet.sim.scheduler import Node, schedule

GPU = "nvidia.com/gpu"
POD = """
apiVersion: v1
kind: Pod
metadata: {name: one, labels: {app: x}}
spec:
  nodeSelector: {gpu: "true"}
  runtimeClassName: nvidia
  securityContext: {runAsUser: 1000}
  initContainers:
  - {name: init, image: i, resources: {limits: {nvidia.com/gpu: 2}}}
  containers:
  - name: main
    image: image:1
    command: [sleep]
    args: ["1"]
    env:
    - {name: A, value: "1"}
    - {name: POD, valueFrom: {fieldRef: {fieldPath: metadata.name}}}
    - {name: APP, valueFrom: {fieldRef: {fieldPath: "metadata.labels['app']"}}}
    - {name: SECRET, valueFrom: {secretKeyRef: {name: s, key: k}}}
    resources:
      limits: {nvidia.com/gpu: 1, memory: 1Gi}
      requests: {cpu: 500m}
    securityContext: {privileged: true, runAsUser: 7}
"""


def read(tmp_path: Path, text: str | bytes) -> list[Pod]:
    return load(write(tmp_path, text))


def write(tmp_path: Path, text: str | bytes) -> Path:
    path = tmp_path / "pods.yaml"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def simple(name: str = "p", *, meta: str = "", spec: str = "", container: str = "") -> str:
    """One Pod, with more fields in one of three places."""
    return (
        f"{{apiVersion: v1, kind: Pod, metadata: {{name: {name}, {meta}}}, "
        f"spec: {{{spec + ',' if spec else ''} containers: [{{name: c, image: i, {container}}}]}}}}"
    )


def test_a_pod(tmp_path):
    (pod,) = read(tmp_path, POD)
    assert (pod.name, pod.namespace, pod.runtime_class, pod.restart_policy) == ("one", "default", "nvidia", "Always")
    assert pod.node_selector == {"gpu": "true"}
    (main,) = pod.containers
    assert (main.command, main.args) == (("sleep",), ("1",))
    assert main.env == (("A", "1"), ("POD", "one"), ("APP", "x"))
    assert main.notes == ("env SECRET comes from secretKeyRef, which isn't known here: left out",)
    assert main.limits == {GPU: 1, "memory": 1 << 30}
    assert main.requests == {GPU: 1, "memory": 1 << 30, "cpu": 500}
    assert (main.privileged, main.run_as_user) == (True, 7)
    assert pod.init_containers[0].run_as_user == 1000
    assert pod.requests() == {GPU: 2, "memory": 1 << 30, "cpu": 500}


def test_uids_are_the_same_in_every_run_and_may_be_given(tmp_path):
    (one,), (again,) = read(tmp_path, POD), read(tmp_path, POD)
    assert one.uid == again.uid
    (other,) = read(tmp_path, POD.replace("name: one", "name: two"))
    assert other.uid != one.uid
    (given,) = read(tmp_path, POD.replace("name: one", "name: one, uid: abc"))
    assert given.uid == "abc"


TEMPLATE = """
metadata: {name: owner, namespace: ns}
spec:
  COUNT
  template:
    metadata: {name: ignored, namespace: other, uid: u, labels: {app: y}}
    spec: {restartPolicy: POLICY, containers: [{name: c, image: i}]}
"""


def made(kind: str, count: str = "", *, name: str = "owner") -> str:
    job = kind == "Job"
    version = "batch/v1" if job else "v1" if kind == "ReplicationController" else "apps/v1"
    text = TEMPLATE.replace("COUNT", count).replace("POLICY", "Never" if job else "Always")
    return f"apiVersion: {version}\nkind: {kind}\n{text.replace('owner', name)}"


@pytest.mark.parametrize(
    ("kind", "count", "names"),
    [
        ("Deployment", "replicas: 3", ["owner-0", "owner-1", "owner-2"]),
        ("Deployment", "replicas: null", ["owner-0"]),
        ("Job", "parallelism: 2", ["owner-0", "owner-1"]),
        ("Job", "{parallelism: 5, completions: 2,", ["owner-0", "owner-1"]),
        ("DaemonSet", "replicas: 7", ["owner-0"]),
        ("StatefulSet", "", ["owner-0"]),
        ("ReplicaSet", "replicas: 1", ["owner-0"]),
        ("ReplicationController", "replicas: 2", ["owner-0", "owner-1"]),
    ],
)
def test_what_makes_pods(tmp_path, kind, count, names):
    count = count.strip("{,").replace(", ", "\n  ")
    pods = read(tmp_path, made(kind, count))
    assert [pod.name for pod in pods] == names
    assert {(pod.namespace, pod.labels["app"]) for pod in pods} == {("ns", "y")}
    assert len({pod.uid for pod in pods}) == len(pods)


def test_names_of_an_owner_that_has_none_or_a_long_one(tmp_path):
    (pod,) = read(tmp_path, made("Job").replace("name: owner", "generateName: train-"))
    assert pod.name.startswith("train-") and pod.name.endswith("-0") and len(pod.name) == len("train-xxxxx-0")
    (pod,) = read(tmp_path, made("Job", name="a" * 253))
    assert pod.name == "a" * 251 + "-0"
    with pytest.raises(ConfigError, match=r"document 1: metadata.name: nothing \(wanted a name"):
        read(tmp_path, made("Deployment").replace("name: owner, ", ""))


def test_controllers_of_one_name(tmp_path):
    both = f"{made('Deployment')}\n---\n{made('DaemonSet')}"
    assert [pod.name for pod in read(tmp_path, both)] == ["owner-0", "owner-daemonset-0"]
    with pytest.raises(ConfigError, match='Deployment "owner" already exists'):
        read(tmp_path, f"{made('Deployment')}\n---\n{made('Deployment')}")


def test_no_replicas_are_a_note(tmp_path):
    path = write(tmp_path, f"{made('Deployment', 'replicas: 0')}\n---\n{simple()}")
    pods, notes = load_with_notes(path)
    assert [pod.name for pod in pods] == ["p"]
    assert notes == [f"{path}: passed over: Deployment owner (no replicas)"]
    with pytest.raises(ConfigError, match=r"holds no Pod: Deployment owner \(no replicas\)"):
        read(tmp_path, made("Deployment", "replicas: 0"))
    with pytest.raises(ConfigError, match=r"holds no Pod: Job owner \(no replicas\)"):
        read(tmp_path, made("Job", "suspend: true"))


def test_a_cron_job(tmp_path):
    text = (
        "apiVersion: batch/v1\nkind: CronJob\nmetadata: {name: c}\n"
        "spec: {jobTemplate: {spec: {template: {spec: {restartPolicy: Never, containers: [{name: a, image: i}]}}}}}"
    )
    assert [pod.name for pod in read(tmp_path, text)] == ["c-0"]


def test_lists_and_several_documents(tmp_path):
    bare = simple("c").replace("apiVersion: v1, kind: Pod, ", "")  # as in the API's own lists
    text = (
        f"---\n---\n{simple('a')}\n---\napiVersion: v1\nkind: List\nitems: [{simple('b')}]\n"
        f"---\napiVersion: v1\nkind: PodList\nitems: [{bare}]\n"
    )
    assert [pod.name for pod in read(tmp_path, text)] == ["a", "b", "c"]


def test_what_is_beside_pods_is_noted(tmp_path):
    others = "".join(f"---\napiVersion: v1\nkind: ConfigMap\nmetadata: {{name: m{n}}}\n" for n in range(30))
    foreign = "---\n{apiVersion: batch.volcano.sh/v1alpha1, kind: Job, metadata: {name: v}, spec: {tasks: []}}\n"
    path = write(tmp_path, foreign + others + "---\n" + simple())
    pods, (note,) = load_with_notes(path)
    assert [pod.name for pod in pods] == ["p"]
    assert note.startswith(f"{path}: passed over: Job v (batch.volcano.sh/v1alpha1), ConfigMap m0 (v1), ")
    assert note.endswith("ConfigMap m18 (v1) and 11 more")
    with pytest.raises(ConfigError, match=r"holds no Pod: ConfigMap m0 .* and 25 more \(wanted Pod, List, CronJob"):
        read(tmp_path, others)


def test_standard_input(monkeypatch):
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(simple("typed").encode())))
    assert [pod.name for pod in load(Path("-"))] == ["typed"]
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(b"kind: Service\napiVersion: v1")))
    with pytest.raises(ConfigError, match="standard input holds no Pod: Service"):
        load(Path("-"))


def test_each_pod_once(tmp_path):
    with pytest.raises(ConfigError, match='pods "p" already exists: namespace default'):
        read(tmp_path, f"{simple()}\n---\n{simple()}")
    assert len(read(tmp_path, f"{simple()}\n---\n{simple(meta='namespace: other')}")) == 2
    with pytest.raises(ConfigError, match=r'pods "q": metadata.uid: same, which is that of p'):
        read(tmp_path, f"{simple(meta='uid: same')}\n---\n{simple('q', meta='uid: same')}")
    path = write(tmp_path, simple())
    with pytest.raises(ConfigError, match='pods "p" already exists'):
        load_all([path, path])
    with pytest.raises(ConfigError, match='pods "p" already exists'):
        check_unique([*load(path), *load(path)])


def test_a_generated_name_is_the_same_in_every_run(tmp_path):
    text = simple("x").replace("name: x", "generateName: run-")
    both = f"{text}\n---\n{text}"
    names = [pod.name for pod in read(tmp_path, both)]
    assert names == [pod.name for pod in read(tmp_path, both)]
    assert len(set(names)) == 2 and all(name.startswith("run-") and len(name) == 9 for name in names)


def test_native_sidecars(tmp_path):
    spec = (
        "initContainers: ["
        "{name: s, image: i, restartPolicy: Always, resources: {limits: {nvidia.com/gpu: 1}}},"
        "{name: i, image: i, resources: {limits: {nvidia.com/gpu: 3}}}]"
    )
    (pod,) = read(tmp_path, simple(spec=spec, container="resources: {limits: {nvidia.com/gpu: 2}}"))
    assert [one.restart_always for one in (*pod.init_containers, *pod.containers)] == [True, False, False]
    assert pod.requests() == {GPU: 4}  # the sidecar beside the init container is more than beside the main one


def container(amount: int, *, always: bool = False) -> ContainerSpec:
    return ContainerSpec("c", requests={GPU: amount}, restart_always=always)


@pytest.mark.parametrize(
    ("inits", "containers", "most"),
    [
        ([], [2, 1], 3),
        ([(5, False)], [2, 1], 5),
        ([(1, True), (1, True)], [2], 4),
        ([(3, False), (1, True)], [1], 3),
        ([(1, True), (3, False)], [1], 4),
    ],
)
def test_what_the_scheduler_counts(inits, containers, most):
    pod = Pod("p", tuple(map(container, containers)), tuple(container(n, always=always) for n, always in inits))
    assert pod.requests() == {GPU: most}


def test_a_node_by_hand(tmp_path):
    (pod,) = read(tmp_path, simple(spec="nodeName: full", container="resources: {limits: {nvidia.com/gpu: 2}}"))
    assert schedule(pod, [Node("free", {}, {GPU: 8}), Node("full", {}, {GPU: 1})]).node == "full"
    placement = schedule(pod, [Node("free")])
    assert placement.node is None and "full, and there is no such node (nodes: free)" in placement.message


def test_what_is_passed_over_is_noted(tmp_path):
    spec = "hostPID: true, hostIPC: false, volumes: [{name: v}], securityContext: {fsGroup: 1}, affinity: {}"
    container = "volumeMounts: [{name: v, mountPath: /v}], securityContext: {runAsNonRoot: true}, ports: []"
    (pod,) = read(tmp_path, simple(spec=spec, container=container))
    assert pod.notes == ("passed over: volumes, hostPID", "passed over: securityContext.fsGroup")
    assert pod.containers[0].notes == (
        "passed over: volumeMounts",
        "passed over: securityContext.runAsNonRoot",
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [", "document 1 is no YAML: line 2, column 1"),
        ("", "holds no Pod"),
        ("[1]", "document 1: \\[1\\] \\(wanted a map\\)"),
        ("apiVersion: v1", "document 1: kind: nothing"),
        ("kind: Pod", "document 1: apiVersion: nothing"),
        ("---\napiVersion: v1\nkind: Pod\n", "document 1: metadata"),
        ("apiVersion: v1\nkind: Pod\nmetadata: {name: a}\nspec: {containers: []}", "spec.containers: \\[\\]"),
        ("apiVersion: v1\nkind: Pod\nmetadata: {name: a}", "Pod a: spec: nothing"),
        (POD.replace("nvidia.com/gpu: 1,", "nvidia.com/gpu: 1.5,"), "limits of nvidia.com/gpu: 1.5.*whole number"),
        (POD.replace("nvidia.com/gpu: 1,", "nvidia.com/gpu: x,"), "wanted a quantity"),
        (POD.replace("nvidia.com/gpu: 1,", "nvidia.com/gpu: -1,"), "below zero"),
        (POD.replace("nvidia.com/gpu: 1,", "5: 1,"), "resources.limits\\['5'\\].*domain/name"),
        (POD.replace("nvidia.com/gpu: 1,", "'5:': 1,"), "resources.limits\\['5:'\\].*domain/name"),
        (POD.replace("nvidia.com/gpu: 1,", "a/b/c: 1,"), "domain/name"),
        (POD.replace("requests: {cpu: 500m}", "requests: {nvidia.com/gpu: 2}"), "equal to limits, 1"),
        (POD.replace("requests: {cpu: 500m}", "requests: {a.com/b: 2}"), "a limit too"),
        (POD.replace("requests: {cpu: 500m}", "requests: {memory: 2Gi}"), "at most the limit, 1073741824"),
        (POD.replace('value: "1"', "value: 1"), "spec.containers\\[0\\].env\\[0\\].value: 1 .*put it in quotes"),
        (POD.replace("limits: {nvidia.com/gpu: 1", "limit: {nvidia.com/gpu: 1"), "'limit'.*did you mean limits"),
        (made("Job").replace("Never", "Always"), "OnFailure or Never in a Job"),
        (made("Deployment").replace("Always", "Never"), "Always in a Deployment"),
        (made("Deployment", "replicas: -1"), "spec.replicas: -1"),
        (made("Deployment", "replicas: many"), "spec.replicas: 'many'"),
        (made("Deployment", "replicas: 2000000000"), "too large once"),
    ],
)
def test_what_is_wrong(tmp_path, text, message):
    with pytest.raises(ConfigError, match=message):
        read(tmp_path, text)


@pytest.mark.parametrize(
    ("place", "text", "message"),
    [
        ("meta", "namespace: ../x", "metadata.namespace: '../x'"),
        ("meta", "namespace: a.b", "metadata.namespace"),
        ("meta", "uid: a/../b", "metadata.uid: 'a/../b'"),
        ("meta", f"uid: {'a' * 65}", "metadata.uid"),
        ("meta", "labels: {app: 5}", "metadata.labels\\['app'\\]: 5 .*quotes"),
        ("meta", "labels: {-app: x}", "'-app'"),
        ("meta", "labels: {app: 'a b'}", "'a b'"),
        ("meta", "annotations: {a/b/c: x}", "'a/b/c'"),
        ("meta", "annotations: {a: [x]}", "metadata.annotations\\['a'\\]"),
        ("meta", f"annotations: {{a: {'x' * 300_000}}}", "at most 262144 bytes"),
        ("spec", "runtimeClassName: a/b", "runtimeClassName: 'a/b'"),
        ("spec", "nodeName: A", "nodeName"),
        ("spec", "restartPolicy: Sometimes", "one of Always, OnFailure, Never"),
        ("spec", "hostPID: yes please", "hostPID.*true or false"),
        ("spec", "tolerations: [{operator: Equal}]", "Exists, since there is no key"),
        ("spec", "tolerations: [{key: a, operator: Exists, value: b}]", "no value with"),
        ("spec", "tolerations: [{key: a, effect: Never}]", "one of NoSchedule"),
        ("spec", "securityContext: {runAsUser: bob}", "runAsUser: 'bob'"),
        ("spec", "securityContext: {runAsUser: -5}", "runAsUser: -5"),
        ("container", "securityContext: {runAsUser: 1.5}", "runAsUser: 1.5"),
        ("container", "securityContext: {runAsUser: true}", "runAsUser: true"),
        ("container", "securityContext: {privileged: 1}", "privileged: 1"),
        ("container", "command: [1]", "command\\[0\\]: 1"),
        ("container", 'args: ["\\0"]', "without NUL"),
        ("container", "image: ''", "image"),
        ("container", "image: 'a b'", "image: 'a b'"),
        ("container", "name: A", "name: 'A'"),
        ("container", f"name: {'a' * 64}", "at most 63"),
        ("container", "env: [{name: 'A=B'}]", "'A=B'"),
        ("container", "env: [{value: x}]", "env\\[0\\].name: nothing"),
        ("container", "env: [{name: A, value: x, valueFrom: {fieldRef: {fieldPath: metadata.name}}}]", "no value"),
        ("container", "env: [{name: A, valueFrom: {}}]", "one of fieldRef"),
        ("container", "env: [{name: A, valueFrom: {fieldRef: {fieldPath: spec.x}}}]", "'spec.x'"),
        ("container", "envFrom: [{}]", "one of configMapRef"),
        ("container", "volumeMount: []", "did you mean volumeMounts"),
    ],
)
def test_fields_that_are_wrong(tmp_path, place, text, message):
    with pytest.raises(ConfigError, match=message) as caught:
        read(tmp_path, simple(**{place: text}))
    assert len(str(caught.value)) < 500 and "pods.yaml, document 1" in str(caught.value)


@pytest.mark.parametrize("name", ["0", "['a']", "A", "a_b", "../a", "a..b", "-a", "'a/b'", '"\\e[31m"', "a" * 254])
def test_names_of_pods(tmp_path, name):
    with pytest.raises(ConfigError, match=r"document 1: metadata\.name: ") as caught:
        read(tmp_path, simple(name))
    assert "\x1b" not in str(caught.value) and len(str(caught.value)) < 400


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(ConfigError, match="can't be read: No such file"):
        load(tmp_path / "no")
    with pytest.raises(ConfigError, match="can't be read: Is a directory"):
        load(tmp_path)
    with pytest.raises(ConfigError, match=r"no\\x1b\[31m can't be read"):
        load(tmp_path / "no\x1b[31m")

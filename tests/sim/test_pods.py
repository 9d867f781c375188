from __future__ import annotations

import pytest

from gpulet.errors import ConfigError
from gpulet.sim.pods import load
from gpulet.sim.quantity import parse_quantity

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


def read(tmp_path, text):
    path = tmp_path / "pods.yaml"
    path.write_text(text)
    return load(path)


def test_a_pod(tmp_path):
    (pod,) = read(tmp_path, POD)
    assert (pod.name, pod.namespace, pod.runtime_class, pod.restart_policy) == ("one", "default", "nvidia", "Always")
    assert pod.node_selector == {"gpu": "true"}
    (main,) = pod.containers
    assert (main.command, main.args) == (("sleep",), ("1",))
    assert main.env == (("A", "1"), ("POD", "one"), ("APP", "x"))
    assert main.notes == ("env SECRET comes from secretKeyRef, which isn't known here: left out",)
    assert main.limits == {"nvidia.com/gpu": 1, "memory": 1 << 30}
    assert main.requests == {"nvidia.com/gpu": 1, "memory": 1 << 30, "cpu": 500}
    assert (main.privileged, main.run_as_user) == (True, 7)
    assert pod.init_containers[0].run_as_user == 1000
    assert pod.requests() == {"nvidia.com/gpu": 2, "memory": 1 << 30, "cpu": 500}


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
    metadata: {labels: {app: y}}
    spec: {containers: [{name: c, image: i}]}
"""


@pytest.mark.parametrize(
    ("kind", "count", "names"),
    [
        ("Deployment", "replicas: 3", ["owner-0", "owner-1", "owner-2"]),
        ("Job", "parallelism: 2", ["owner-0", "owner-1"]),
        ("DaemonSet", "", ["owner-0"]),
        ("StatefulSet", "", ["owner-0"]),
        ("ReplicaSet", "replicas: 1", ["owner-0"]),
    ],
)
def test_what_makes_pods(tmp_path, kind, count, names):
    pods = read(tmp_path, f"kind: {kind}\n" + TEMPLATE.replace("COUNT", count))
    assert [pod.name for pod in pods] == names
    assert {(pod.namespace, pod.labels["app"]) for pod in pods} == {("ns", "y")}


def test_a_cron_job(tmp_path):
    text = (
        "kind: CronJob\nmetadata: {name: c}\nspec: {jobTemplate: {spec: {template: {spec: {containers: [{name: a}]}}}}}"
    )
    assert [pod.name for pod in read(tmp_path, text)] == ["c-0"]


def test_lists_and_several_documents(tmp_path):
    item = "{kind: Pod, metadata: {name: NAME}, spec: {containers: [{name: c}]}}"
    text = f"---\n---\n{item.replace('NAME', 'a')}\n---\nkind: List\nitems: [{item.replace('NAME', 'b')}]\n"
    assert [pod.name for pod in read(tmp_path, text)] == ["a", "b"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [", "is no YAML"),
        ("", "holds no Pod"),
        ("kind: Service", "document 1: kind: Service"),
        ("[1]", "document 1: \\[1\\] \\(wanted a map\\)"),
        ("---\nkind: Pod\n", "document 1: metadata"),
        ("kind: Pod\nmetadata: {name: a}\nspec: {containers: []}", "Pod a: spec.containers: none"),
        ("kind: Pod\nmetadata: {name: a}\nspec: {containers: [{name: c}, {name: c}]}", "each name once"),
        ("kind: Pod\nmetadata: {name: a}\nspec: {containers: [{image: c}]}", "a container's name"),
        (POD.replace("nvidia.com/gpu: 1,", "nvidia.com/gpu: 1.5,"), "'1.5|1.5.*whole number"),
        (POD.replace("nvidia.com/gpu: 1,", "nvidia.com/gpu: x,"), "wanted a quantity"),
        (POD.replace("nvidia.com/gpu: 1,", "nvidia.com/gpu: -1,"), "below zero"),
        (POD.replace("requests: {cpu: 500m}", "requests: {nvidia.com/gpu: 2}"), "equal to limits, 1"),
        (POD.replace("requests: {cpu: 500m}", "requests: {a.com/b: 2}"), "which must be set"),
        (POD.replace('value: "1"', "value: 1"), "put it in quotes"),
    ],
)
def test_what_is_wrong(tmp_path, text, message):
    with pytest.raises(ConfigError, match=message):
        read(tmp_path, text)


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(ConfigError, match="can't be read: No such file"):
        load(tmp_path / "no")


@pytest.mark.parametrize(
    ("resource", "text", "value"),
    [
        ("cpu", "500m", 500),
        ("cpu", 2, 2000),
        ("cpu", "0.1", 100),
        ("memory", "16Gi", 16 << 30),
        ("memory", "1.5G", 1_500_000_000),
        ("memory", "1e3", 1000),
        ("memory", "100m", 1),
        ("nvidia.com/gpu", "2", 2),
        ("nvidia.com/gpu", "2k", 2000),
    ],
)
def test_quantities(resource, text, value):
    assert parse_quantity(resource, text, "here") == value


@pytest.mark.parametrize("text", ["", "Gi", "1 Gi", "1ki", True, None, "0x10"])
def test_no_quantities(text):
    with pytest.raises(ConfigError):
        parse_quantity("memory", text, "here")

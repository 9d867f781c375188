"""Manifests that were made to hurt, and how scalars are read."""

from __future__ import annotations

import io
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from gpulet.errors import ConfigError
from gpulet.sim import pods
from gpulet.sim.pods_fields import Budget
from gpulet.sim.pods_yaml import PythonParser, documents

POD: dict[str, Any] = {
    "apiVersion": "v1",
    "kind": "Pod",
    "metadata": {"name": "p", "namespace": "n", "uid": "u", "labels": {"a": "b"}, "annotations": {"a": "b"}},
    "spec": {
        "nodeName": "n",
        "nodeSelector": {"a": "b"},
        "runtimeClassName": "r",
        "restartPolicy": "Never",
        "serviceAccountName": "s",
        "tolerations": [{"key": "k", "operator": "Equal", "value": "v", "effect": "NoSchedule"}],
        "securityContext": {"runAsUser": 1},
        "volumes": [],
        "initContainers": [{"name": "i", "image": "i", "restartPolicy": "Always"}],
        "containers": [
            {
                "name": "c",
                "image": "i",
                "command": ["a"],
                "args": ["b"],
                "env": [
                    {"name": "A", "value": "x"},
                    {"name": "B", "valueFrom": {"fieldRef": {"fieldPath": "metadata.uid"}}},
                ],
                "envFrom": [{"secretRef": {"name": "s"}}],
                "resources": {"limits": {"nvidia.com/gpu": 1}, "requests": {"cpu": "1"}},
                "securityContext": {"privileged": True, "runAsUser": 1},
            }
        ],
    },
}
OWNER: dict[str, Any] = {
    "apiVersion": "apps/v1",
    "kind": "Deployment",
    "metadata": {"generateName": "g-"},
    "spec": {
        "replicas": 2,
        "template": {"metadata": {"labels": {"a": "b"}}, "spec": {"containers": [{"name": "c", "image": "i"}]}},
    },
}
JOB: dict[str, Any] = {
    "apiVersion": "batch/v1",
    "kind": "CronJob",
    "metadata": {"name": "j"},
    "spec": {
        "jobTemplate": {
            "spec": {
                "parallelism": 1,
                "completions": 2,
                "suspend": False,
                "template": {"spec": {"restartPolicy": "Never", "containers": [{"name": "c", "image": "i"}]}},
            }
        }
    },
}
LIST: dict[str, Any] = {"apiVersion": "v1", "kind": "List", "items": [POD, {"apiVersion": "v1", "kind": "Service"}]}


def read(text: str | bytes) -> list[pods.Pod]:
    data = text.encode() if isinstance(text, str) else text
    before, sys.stdin = sys.stdin, SimpleNamespace(buffer=io.BytesIO(data))  # type: ignore[assignment]
    try:
        return pods.load(Path("-"))
    finally:
        sys.stdin = before


def refused(text: str | bytes, match: str = "", *, seconds: float = 10) -> str:
    """The one line that a manifest is refused with, bounded in time and length."""
    started = time.perf_counter()
    with pytest.raises(ConfigError, match=match) as caught:
        read(text)
    assert time.perf_counter() - started < seconds
    line = str(caught.value)
    assert line.isprintable() and len(line) < 1000
    return line


def data(text: str | bytes, **options: Any) -> list[Any]:
    return list(documents(text.encode() if isinstance(text, str) else text, "here", Budget(), **options))


LAUGHS = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{new}: &{new} [{','.join([f'*{old}'] * 9)}]\n" for old, new in zip("abcdefghi", "bcdefghij", strict=True)
)
MERGES = "a: &a {x: 1, y: 2}\n" + "".join(
    f"{new}: &{new} {{<<: [{','.join([f'*{old}'] * 9)}]}}\n" for old, new in zip("abcdefghi", "bcdefghij", strict=True)
)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("&a {apiVersion: v1, kind: List, items: [*a]}", "alias 'a' contains itself"),
        ("&a [*a]", "contains itself"),
        ("&a {*a : 1}", "contains itself"),
        ("[" * 900, "more than 100 levels"),
        ("[" * 3000, "levels|depth"),
        ("[" * 1_000_000, "levels|depth"),
        ("{a: " * 3000, "more than 100 levels"),
        ("- " * 3000, "more than 100 levels"),
        ("? " * 3000, "more than 100 levels"),
        (LAUGHS, "too large once aliases"),
        (MERGES, "too large once aliases"),
        (f"a: &a {'x' * 100_000}\nb: [{'*a,' * 1000}]", "too large once aliases"),
        (f"[{'x,' * 100_000}]", "document 1: \\['x', 'x', 'x', \\.\\.\\.\\]"),
        (f"kind: {'x' * 100_000}\napiVersion: v1", "x\\.\\.\\. \\(v1\\)"),
        ("x" * (3 << 20) + "x", "at most 3 MiB"),
        (b"a: \xff\xfe", "no YAML: .*position"),
        (b"\x80", "no YAML"),
        (b"a: \x00", "no YAML"),
        ("a: *nothing", "line 1, column 4: found undefined alias"),
        ("a: *" + "n" * 10_000, "undefined alias"),
        ("a: b: c", "line 1"),
        ("--- !!python/object:os.system {}", "could not determine a constructor"),
        ("!!int x: y", "no YAML|kind"),
        ("!!bool x", "true or false was expected"),
        ("!!map x", "a map was expected"),
        ("!!seq x", "a list was expected"),
        ("!!str [x]", "expected a scalar"),
        ("!!timestamp x", "could not determine"),
        ("? [a]\n: b", "a key must be text"),
        ("null: b", "a key must be text"),
        ("<<: 5", "expected a mapping"),
        ('"\\ud800"', "no YAML"),
        ('"\\UFFFFFFFF"', "no YAML"),
        (f"{{apiVersion: v1, kind: List, items: [{'{},' * 100_000}]}}", "items\\[0\\].kind: nothing"),
    ],
    ids=lambda value: repr(value[:30]),
)
def test_manifests_made_to_hurt(text, message):
    refused(text, message)


@pytest.mark.parametrize("text", ["[" * 5000, "&a [*a]", '"\\ud800"', '"\\UFFFFFFFF"', "a: \udcff", LAUGHS])
def test_the_parser_in_python_is_bounded_too(text):
    with pytest.raises(ConfigError):
        data(text.encode("utf-8", "surrogateescape"), parser=PythonParser)


def test_both_parsers_say_the_same():
    text = json.dumps([POD, OWNER, JOB, LIST], indent=1)
    assert data(text) == data(text, parser=PythonParser) == [[POD, OWNER, JOB, LIST]]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("5", 5),
        ("-0x1F", -31),
        ("010", 8),
        ("0o10", 8),
        ("08", 8),
        ("1_000", 1000),
        ("1e3", 1000),
        ("1.0", 1),
        ("1.5", 1.5),
        (".5", 0.5),
        ("1e999", "1e999"),
        ("9" * 50, "9" * 50),
        ("10:20", "10:20"),
        ("2024-01-01", "2024-01-01"),
        ("=", "="),
        ("_1", "_1"),
        ("+", "+"),
        (".", "."),
        ("yes", True),
        ("Off", False),
        ("y", "y"),
        ("~", None),
        ("", None),
        ("null", None),
        ("!!str 5", "5"),
        ("'5'", "5"),
        ("{5: a, 1.5: b, true: c, 0x10: d}", {"5": "a", "1.5": "b", "true": "c", "16": "d"}),
        ("{<<: {a: 1, b: 1}, b: 2}", {"a": 1, "b": 2}),
        ("{a: 1, a: 2}", {"a": 2}),
        ("[&x {a: 1}, *x]", [{"a": 1}, {"a": 1}]),
        ('{\n\t"a": 1}', {"a": 1}),
        ("\ufeffa: 1", {"a": 1}),
    ],
)
def test_scalars_are_read_as_kubectl_reads_them(text, value):
    (read,) = data("--- " + text) if not text.startswith("\ufeff") else data(text)
    assert read == value and type(read) is type(value)


def test_utf_16_is_read():
    assert data("a: é".encode("utf-16")) == [{"a": "é"}]


def test_a_large_bundle_is_read_soon():
    service = "---\napiVersion: v1\nkind: Service\nmetadata: {name: s, labels: {a: b}}\nspec: {ports: [{port: 80}]}\n"
    text = service * 5000 + "---\n" + json.dumps(POD)
    started = time.perf_counter()
    assert [pod.name for pod in read(text)] == ["p"]
    assert time.perf_counter() - started < 30


def places(value: Any, way: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The way to each value of a tree."""
    yield way
    below = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, one in below:
        yield from places(one, (*way, key))


def put(value: Any, way: tuple[Any, ...], new: Any) -> Any:
    """A copy of a tree with another value at one place."""
    if not way:
        return new
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[way[0]] = put(copy[way[0]], way[1:], new)
    return copy


WAYS = [(tree, way) for tree in (POD, OWNER, JOB, LIST) for way in places(tree)]


@pytest.mark.parametrize("tree", [POD, OWNER, JOB, LIST], ids=lambda tree: tree["kind"])
def test_the_trees_themselves_are_right(tree):
    assert read(json.dumps(tree))


SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8), st.dates(), st.binary(max_size=3)
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.one_of(st.text(max_size=5), st.integers(), st.booleans(), st.none()), inner, max_size=3),
    ),
    max_leaves=6,
)


def _check(text: str | bytes) -> None:
    try:
        found = read(text)
    except ConfigError as error:
        line = str(error)
        assert line.isprintable() and len(line) < 1000
    else:
        assert found and all(pod.name and pod.uid and pod.containers for pod in found)


@settings(deadline=None, max_examples=400, suppress_health_check=[HealthCheck.too_slow])
@given(st.sampled_from(WAYS), VALUES)
@example((POD, ("metadata", "name")), 0)
@example((POD, ("metadata", "name")), ["a"])
@example((POD, ("spec", "containers", 0, "resources", "limits")), {5: None})
def test_any_value_in_any_field_gives_pods_or_an_error(place, value):
    tree, way = place
    _check(yaml.dump(put(tree, way, value), Dumper=yaml.SafeDumper, allow_unicode=True))


@pytest.mark.parametrize("value", [None, True, 0, -1, 1.5, "", "x\0", "\x1b[31m", "../..", [], [None], {}, {"": None}])
def test_hard_values_in_every_field(value):
    for tree, way in WAYS:
        _check(json.dumps(put(tree, way, value)))


@settings(deadline=None, max_examples=200)
@given(st.one_of(st.text(), st.binary(), st.text("[]{}&*!:-,? \n'\"ab<%#|>", max_size=40)))
def test_any_text_gives_pods_or_an_error(text):
    _check(text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text)

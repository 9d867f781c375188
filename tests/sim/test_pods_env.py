from __future__ import annotations

import time

import pytest

from gpulet.errors import ConfigError
from gpulet.sim.pods_env import LONGEST, environment, expand
from gpulet.sim.pods_fields import Budget, Field

KNOWN = {"metadata.name": "web-0", "metadata.labels['app']": "web"}


def field(value: object, budget: Budget | None = None) -> Field:
    return Field(value, "here", "", budget=budget or Budget())


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("plain", "plain"),
        ("", ""),
        ("$(A)", "1"),
        ("x$(A)y$(B)z", "x1y2z"),
        ("$$(A)", "$(A)"),
        ("$$$(A)", "$1"),
        ("$$$$(A)", "$$(A)"),
        ("$(NO)", "$(NO)"),
        ("$(A", "$(A"),
        ("$A $", "$A $"),
        ("$", "$"),
        ("$()", "$()"),
        ("$($(A))", "$($(A))"),
        ("$(A)$", "1$"),
        ("é$(A)", "é1"),
    ],
)
def test_expansion(text, value):
    assert expand(field(text), {"A": "1", "B": "2"}) == value


def test_only_earlier_variables_are_seen():
    env, notes = environment(
        field(
            {
                "env": [
                    {"name": "LATE", "value": "$(A)"},
                    {"name": "A", "value": "1"},
                    {"name": "B", "value": "$(A)2"},
                    {"name": "NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
                    {"name": "C", "value": "$(NAME)/$(B)"},
                    {"name": "A", "value": "again $(A)"},
                    {"name": "EMPTY"},
                ]
            }
        ),
        KNOWN,
    )
    assert dict(env) == {
        "LATE": "$(A)",
        "A": "again 1",
        "B": "12",
        "NAME": "web-0",
        "C": "web-0/12",
        "EMPTY": "",
    }
    assert notes == []


def test_what_the_pod_knows_of_itself_and_what_it_does_not():
    def reference(path: str) -> dict[str, object]:
        return {"fieldRef": {"fieldPath": path}}

    env, notes = environment(
        field(
            {
                "env": [
                    {"name": "APP", "valueFrom": reference("metadata.labels['app']")},
                    {"name": "TIER", "valueFrom": reference("metadata.labels['tier']")},
                    {"name": "IP", "valueFrom": reference("status.podIP")},
                    {"name": "CPUS", "valueFrom": {"resourceFieldRef": {"resource": "limits.cpu"}}},
                    {"name": "TEXT", "value": "$(IP)"},
                ],
                "envFrom": [{"configMapRef": {"name": "settings"}}, {"prefix": "X_", "secretRef": {"name": "s"}}],
            }
        ),
        KNOWN,
    )
    assert env == (("APP", "web"), ("TIER", ""), ("TEXT", "$(IP)"))
    assert notes == [
        "envFrom configMapRef 'settings': left out",
        "envFrom secretRef 's': left out",
        "env IP comes from status.podIP, which isn't known here: left out",
        "env CPUS comes from resourceFieldRef, which isn't known here: left out",
    ]


def test_values_that_double_stay_within_what_execve_takes():
    doubling = [{"name": "V0", "value": "x" * 100}]
    doubling += [{"name": f"V{n}", "value": f"$(V{n - 1})$(V{n - 1})"} for n in range(1, 60)]
    with pytest.raises(ConfigError, match=rf"env\[11\]\.value: .*at most {LONGEST} bytes"):
        environment(field({"env": doubling}), {})
    assert len(expand(field("x" * LONGEST), {})) == LONGEST
    with pytest.raises(ConfigError, match=f"at most {LONGEST} bytes"):
        expand(field("é" * (LONGEST // 2 + 1)), {})


def test_many_large_values_are_paid_for():
    budget = Budget(1 << 20)
    with pytest.raises(ConfigError, match="here: manifest is too large"):
        for _ in range(100):
            expand(field("$(A)", budget), {"A": "x" * 100_000})


def test_what_nothing_closes_costs_no_search():
    started = time.perf_counter()
    text = "$(" * (LONGEST // 2)
    assert expand(field(text), {}) == text
    assert time.perf_counter() - started < 2

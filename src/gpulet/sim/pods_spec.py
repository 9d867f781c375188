"""One Pod from its manifest, held to the API server's rules: what is wrong is refused, what is right but means
nothing here is passed over with a note."""

from __future__ import annotations

import uuid
from typing import Any

from gpulet.sim import pods_env
from gpulet.sim import pods_names as names
from gpulet.sim import pods_schema as schema
from gpulet.sim.pods_fields import Field
from gpulet.sim.pods_model import ContainerSpec, Pod
from gpulet.sim.quantity import parse_quantity

_NAMESPACE = uuid.UUID("6f0f4c6e-6f2a-4c43-9f4e-0f0d8f6f3a55")  # any fixed one: uids are the same in every run
_ANNOTATIONS = 256 * 1024  # bytes of all of them together


def make_pod(metadata: Field, spec: Field, *, name: str = "", namespace: str = "") -> Pod:
    """A Pod. name, namespace: its owner's word, where a controller makes it; then the template has none.

    Raises ConfigError.
    """
    metadata.known(schema.METADATA)
    owned = bool(name)
    if not owned:
        name, namespace = own_name(metadata), own_namespace(metadata)
    place = f"{metadata.place}, Pod {name}"
    metadata, spec = metadata.within(place), spec.within(place)
    if not spec.given:
        raise spec.wrong("what the Pod is made of")
    spec.known(schema.POD)
    uid = "" if owned else metadata["uid"].name(names.UID)
    uid = uid or str(uuid.uuid5(_NAMESPACE, f"{namespace}/{name}"))
    labels = _texts(metadata["labels"], names.KEY, names.LABEL_VALUE)
    annotations = _texts(metadata["annotations"], names.ANNOTATION)
    if sum(len(text.encode()) for pair in annotations.items() for text in pair) > _ANNOTATIONS:
        raise metadata["annotations"].wrong(f"at most {_ANNOTATIONS} bytes", seen="more")
    known = {
        "metadata.name": name,
        "metadata.namespace": namespace,
        "metadata.uid": uid,
        "spec.serviceAccountName": spec["serviceAccountName"].name(names.SUBDOMAIN, "default"),
    }
    for section, texts in (("labels", labels), ("annotations", annotations)):
        known |= {f"metadata.{section}['{key}']": text for key, text in texts.items()}
    node_name = spec["nodeName"].name(names.SUBDOMAIN)
    if node_name:
        known["spec.nodeName"] = node_name
    containers, inits = _containers(spec, known)
    return Pod(
        name,
        containers,
        inits,
        namespace,
        uid,
        labels,
        annotations,
        _texts(spec["nodeSelector"], names.KEY, names.LABEL_VALUE),
        spec["runtimeClassName"].name(names.SUBDOMAIN),
        spec["restartPolicy"].choice("Always", "OnFailure", "Never"),
        tuple(_toleration(item) for item in spec["tolerations"].items()),
        node_name,
        _pod_notes(spec),
    )


def own_name(metadata: Field) -> str:
    """An object's name; where only generateName stands, one that is the same in every run."""
    name = metadata["name"].name(names.SUBDOMAIN)
    base = metadata["generateName"].name(names.PREFIX)
    if name:
        return name
    if not base:
        raise metadata["name"].wrong("a name, or generateName")
    # the file, the document and the item tell apart what has the same generateName
    number = uuid.uuid5(_NAMESPACE, f"{metadata.place} {metadata.path}").int
    letters = "bcdfghjklmnpqrstvwxz2456789"  # the API server's, which make no words
    return base[:58] + "".join(letters[number // 27**place % 27] for place in range(5))


def own_namespace(metadata: Field) -> str:
    """An object's namespace."""
    return metadata["namespace"].name(names.LABEL, "default")


def _containers(spec: Field, known: dict[str, str]) -> tuple[tuple[ContainerSpec, ...], tuple[ContainerSpec, ...]]:
    context = spec["securityContext"].known(schema.POD_CONTEXT)
    user = context["runAsUser"].whole()
    seen: set[str] = set()
    made: dict[str, tuple[ContainerSpec, ...]] = {}
    for section in ("initContainers", "containers"):
        made[section] = tuple(
            _container(item, known, user, seen, init=section == "initContainers") for item in spec[section].items()
        )
    if not made["containers"]:
        raise spec["containers"].wrong("at least one container")
    return made["containers"], made["initContainers"]


def _container(
    item: Field, known: dict[str, str], pod_user: int | None, seen: set[str], *, init: bool
) -> ContainerSpec:
    item.known(schema.CONTAINER)
    name = item["name"].needed(names.LABEL)
    if name in seen:
        raise item["name"].wrong("each container's name once")
    seen.add(name)
    context = item["securityContext"].known(schema.CONTEXT)
    user = context["runAsUser"].whole()
    env, notes = pods_env.environment(item, known)
    limits, requests = _resources(item["resources"])
    policy = item["restartPolicy"].choice("", "Always", "OnFailure", "Never")
    if policy and not (init and policy == "Always"):
        notes.append(f"passed over: restartPolicy {policy}")
    variables = dict(env)
    return ContainerSpec(
        name,
        item["image"].needed(names.IMAGE),
        tuple(pods_env.expand(word, variables) for word in item["command"].items()),
        tuple(pods_env.expand(word, variables) for word in item["args"].items()),
        env,
        limits,
        requests,
        context["privileged"].flag(),
        pod_user if user is None else user,
        (*notes, *_passed_over(item, schema.CONTAINER_NOTED), *_passed_over(context, schema.CONTEXT_NOTED)),
        init and policy == "Always",
    )


def _resources(section: Field) -> tuple[dict[str, int], dict[str, int]]:
    """Limits and requests as the API server takes them: a limit implies a request, which never exceeds it; an extended
    resource is a whole number, with the two equal."""
    section.known(("limits", "requests", "claims"))
    limits, given = (_amounts(section[part]) for part in ("limits", "requests"))
    for name, amount in given.items():
        exact = "/" in name or name.startswith("hugepages-")
        if exact and limits.get(name) != amount:
            wanted = f"equal to limits, {limits[name]}" if name in limits else "a limit too, the same"
            raise section["requests"].wrong(wanted, seen=f"{name} {amount}")
        if amount > limits.get(name, amount):
            raise section["requests"].wrong(f"at most the limit, {limits[name]}", seen=f"{name} {amount}")
    return limits, {**limits, **given}


def _amounts(section: Field) -> dict[str, int]:
    amounts = {}
    for name, field in section.entries():
        if not names.RESOURCE.allows(name):
            raise field.wrong(names.RESOURCE.wanted, seen="the name of the resource")
        amounts[name] = parse_quantity(name, field.value, f"{section.place}: {section.path}")
    return amounts


def _texts(section: Field, key_rule: names.Rule, value_rule: names.Rule | None = None) -> dict[str, str]:
    texts = {}
    for key, field in section.entries():
        if not key_rule.allows(key):
            raise field.wrong(key_rule.wanted, seen="the key")
        texts[key] = field.name(value_rule) if value_rule else field.text()
    return texts


def _toleration(item: Field) -> dict[str, Any]:
    item.known(("key", "operator", "value", "effect", "tolerationSeconds"))
    made: dict[str, Any] = {
        "key": item["key"].name(names.KEY),
        "operator": item["operator"].choice("Equal", "Exists"),
        "value": item["value"].name(names.LABEL_VALUE),
        "effect": item["effect"].choice("", "NoSchedule", "PreferNoSchedule", "NoExecute"),
        "tolerationSeconds": item["tolerationSeconds"].whole(2**63 - 1, lowest=-(2**63)),
    }
    if made["operator"] == "Exists" and made["value"]:
        raise item["value"].wrong("no value with operator Exists")
    if made["operator"] != "Exists" and not made["key"]:
        raise item["operator"].wrong("Exists, since there is no key")
    return {name: value for name, value in made.items() if value not in ("", None)}


def _pod_notes(spec: Field) -> tuple[str, ...]:
    for name in ("hostNetwork", "hostPID", "hostIPC", "shareProcessNamespace"):
        spec[name].flag()
    return (*_passed_over(spec, schema.POD_NOTED), *_passed_over(spec["securityContext"], schema.POD_CONTEXT_NOTED))


def _passed_over(section: Field, fields: tuple[str, ...]) -> list[str]:
    prefix = "securityContext." if section.path.endswith("securityContext") else ""
    # empty lists and `false` ask for nothing
    found = [f"{prefix}{name}" for name in fields if section[name].value not in (None, False, [], {}, "")]
    return [f"passed over: {', '.join(found)}"] if found else []

"""A container's environment as the kubelet makes it from the manifest: references, fields of the Pod, expansion."""

from __future__ import annotations

from collections.abc import Mapping

from gpulet.errors import ConfigError
from gpulet.sim.pods_fields import Field, shown
from gpulet.sim.pods_names import ANNOTATION, ENV_NAME, KEY

LONGEST = 128 * 1024 - 1  # bytes of one string that execve takes (MAX_ARG_STRLEN of linux/binfmts.h, with the NUL)
SOURCES = ("fieldRef", "resourceFieldRef", "configMapKeyRef", "secretKeyRef", "fileKeyRef")
LATER = ("spec.nodeName", "status.hostIP", "status.hostIPs", "status.podIP", "status.podIPs")  # known on a node

Env = tuple[tuple[str, str], ...]


def environment(container: Field, known: Mapping[str, str]) -> tuple[Env, list[str]]:
    """A container's variables in the manifest's order, and what was left out.

    known: what fieldRef may ask for, "metadata.name" -> "web-0". Raises ConfigError.
    """
    env: dict[str, str] = {}
    notes = [f"envFrom {_reference(source)}: left out" for source in container["envFrom"].items()]
    for item in container["env"].items():
        item.known(("name", "value", "valueFrom"))
        name = item["name"].needed(ENV_NAME)
        source = item["valueFrom"]
        if not source.given:
            env[name] = expand(item["value"], env)
            continue
        if item["value"].text():
            raise item["value"].wrong("no value beside valueFrom")
        value = _field(source, known)
        if value is None:
            notes.append(f"env {name} comes from {_what(source)}, which isn't known here: left out")
        else:
            env[name] = value
    return tuple(env.items()), notes


def _reference(source: Field) -> str:
    source.known(("prefix", "configMapRef", "secretRef"))
    kinds = [kind for kind in ("configMapRef", "secretRef") if source[kind].given]
    if len(kinds) != 1:
        raise source.wrong("one of configMapRef and secretRef")
    return f"{kinds[0]} {shown(source[kinds[0]]['name'].text())}"


def _what(source: Field) -> str:
    path = source["fieldRef"]["fieldPath"]
    return path.text() if path.given else next(iter(source.map()))


def _field(source: Field, known: Mapping[str, str]) -> str | None:
    """The value of valueFrom, None where it is nothing of the Pod's own."""
    if len(source.known(SOURCES).map()) != 1:
        raise source.wrong(f"one of {', '.join(SOURCES)}")
    kind = next(iter(source.map()))
    if kind != "fieldRef":
        source[kind].map()
        return None
    path = source["fieldRef"].known(("apiVersion", "fieldPath"))["fieldPath"]
    text = path.text()
    if text in known:
        return known[text]
    section, bracket, key = text.partition("['")
    rule = {"metadata.labels": KEY, "metadata.annotations": ANNOTATION}.get(section)
    if bracket and key.endswith("']") and rule and rule.allows(key[:-2]):
        return ""  # of a label that isn't there, as the kubelet has it
    if text not in LATER:
        raise path.wrong("a field such as metadata.name or metadata.labels['app']")
    return None


def expand(field: Field, env: Mapping[str, str]) -> str:
    """Text with $(NAME) replaced, by the kubelet's rules: $$ is $, and names that nobody knows stay as they are."""
    text = field.text()
    size = len(text)
    parts: list[str] = []
    at = 0
    last = text.rfind(
        ")"
    )  # looked for once: thousands of "$(" that nothing closes shall not cost thousands of searches
    while at < len(text) and size <= LONGEST:
        part, after = _next(text, at, last, env)
        parts.append(part)
        size += len(part) - (after - at)
        at = after
    whole = "".join(parts)
    if size > LONGEST or len(whole.encode()) > LONGEST:
        raise field.wrong(f"at most {LONGEST} bytes once $(NAMES) are replaced, which is all that execve takes")
    _pay(field, len(whole) - len(text))
    return whole


def _next(text: str, at: int, last: int, env: Mapping[str, str]) -> tuple[str, int]:
    """What stands at a place of a text once it is replaced, and where it goes on. last: where the last ")" is."""
    dollar = text.find("$", at)
    if dollar < 0 or dollar == len(text) - 1:
        return text[at:], len(text)
    if dollar > at:
        return text[at:dollar], dollar
    after = text[at + 1]
    if after == "$":
        return "$", at + 2
    if after != "(" or last < at:
        return text[at : at + 2], at + 2
    end = text.index(")", at)
    name = text[at + 2 : end]
    return env.get(name, f"$({name})"), end + 1


def _pay(field: Field, grown: int) -> None:
    try:
        field.budget.take(max(0, grown))
    except ConfigError as error:
        raise ConfigError(f"{field.place}: {error.what}", wanted=error.wanted) from error

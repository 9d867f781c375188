"""NVIDIA_REQUIRE_*: what an image needs of the node, the expressions' whole grammar, and whether it holds.

    EXPRESSION := ALTERNATIVE (SPACE ALTERNATIVE)*      one alternative must hold
    ALTERNATIVE := TERM ("," TERM)*                     every term must hold
    TERM := ("cuda" | "driver" | "arch" | "brand") ("=" | "!=" | "<" | "<=" | ">" | ">=") VALUE

Names in any case; empty pieces count for nothing; `brand` knows = and != alone. Versions are digits and dots, compared
part by part as numbers, where a missing part is 0. Reading stops where the outcome is certain, so what stands after a
term that fails, or after an alternative that holds, is never judged. Loaded by the programs in launch/.
"""

from __future__ import annotations

from gpulet.errors import RequestError, RequirementNotMet
from gpulet.request.bundle import Container
from gpulet.request.devices import is_legacy_image
from gpulet.request.trace import Trace
from gpulet.settings import Settings
from gpulet.value import Value

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

    from gpulet.node.gpu import NodeFacts

PREFIX = "NVIDIA_REQUIRE_"
SWITCH = "NVIDIA_DISABLE_REQUIRE"
_TRUE = ("1", "t", "T", "TRUE", "true", "True")  # Go's strconv.ParseBool


class Subject(Value):
    """What an expression is held against: versions of the node and one device's arch and brand.

    None means that there is no such thing to judge (no device selected, or the fact can't be had here): terms about it
    hold. brands: what `brand` may be, where only the model's name is known.
    """

    cuda: str | None = None
    driver: str | None = None
    arch: str | None = None
    brand: str | None = None
    brands: tuple[str, ...] = ()


class Clause(Value):
    """One term that was judged: its text, the value here ("" where there is none), whether it holds, and whether that
    is known rather than assumed."""

    text: str
    here: str
    holds: bool
    known: bool = True


# A model's name has its brand in it, but not whether NVML calls the same the brand's newer "RTX" kind.
_FAMILIES = {
    "GeForce": ("geforce", "geforcertx"),
    "TITAN": ("titan", "titanrtx"),
    "Quadro": ("quadro", "quadrortx"),
    "Tesla": ("tesla", "nvidia"),
}


def subjects(facts: NodeFacts) -> tuple[Subject, ...]:
    """What expressions are held against on a node: once for each kind of GPU it has; its versions alone without any."""
    cuda, driver = facts.cuda or None, facts.driver or None
    found = [Subject(cuda, driver, g.arch or None, g.brand or None, brands_of(g.name)) for g in facts.gpus]
    return tuple(dict.fromkeys(found)) or (Subject(cuda, driver),)


def brands_of(model: str) -> tuple[str, ...]:
    """The brands that a GPU may have by its model's name ("NVIDIA GeForce RTX 4090"), () where the name says none."""
    return next((brands for family, brands in _FAMILIES.items() if family.lower() in model.lower()), ())


def collect(container: Container, settings: Settings, trace: Trace, *, strict: bool = True) -> tuple[str, ...]:
    """The container's expressions, in the order of its environment; a legacy image's CUDA_VERSION is one.

    strict: whether one that can't be read raises RequestError. Else it is left out with a warning: what it asks for
    isn't known, and the image runs under the peer's CDI modes, which read none.
    """
    names = dict.fromkeys(
        name for name, _ in container.env if name.startswith(PREFIX) and not name.startswith(PREFIX + "JETPACK")
    )
    disabled = container.variable(SWITCH)
    if settings.disable_require or disabled in _TRUE:
        where = settings.where("disable_require") if settings.disable_require else container.position(SWITCH)
        trace.note("requirements", SWITCH, where, "switched off")
        return ()
    if is_legacy_image(container):
        names["CUDA_VERSION"] = None
    found = []
    for name in names:
        value, position = container.variable(name) or "", container.position(name)
        try:
            if name == "CUDA_VERSION":
                value = f"cuda>={_major_minor(value)}"
            elif not strict:
                _check_readable(value)
        except RequestError as error:
            if strict:
                raise
            trace.warn("requirements", f"{name}={value}", position, f"passed over: {error}")
            continue
        trace.note("requirements", value, position, "to be held against the node")
        found.append(value)
    return tuple(found)


def _major_minor(version: str) -> str:
    """MAJOR.MINOR of a legacy image's CUDA_VERSION: one to three numbers, perhaps with "v" before and "-..." behind."""
    core = version.removeprefix("v").partition("-")[0].partition("+")[0]
    parts = core.split(".")
    if not 1 <= len(parts) <= 3 or not all(part.isascii() and part.isdigit() and len(part) < 10 for part in parts):
        raise RequestError(
            "CUDA_VERSION of the image",
            seen=repr(version),
            wanted="a version such as 11.8",
            remedy=f"set {SWITCH}=true, or correct the image",
        )
    return f"{int(parts[0])}.{int(parts[1]) if len(parts) > 1 else 0}"


def check(expressions: Iterable[str], subjects: Iterable[Subject]) -> tuple[str, ...]:
    """Raises RequirementNotMet where an expression doesn't hold for a subject, RequestError where it can't be read.
    Answers the terms on whose account one holds though nothing is known of what they are about.

    The error's `what` is "unsatisfied condition: <first alternative>" or "invalid expression".
    """
    subjects = tuple(subjects)
    assumed: dict[str, None] = {}
    for expression in expressions:
        for subject in subjects:
            holds, clauses = evaluate(expression, subject)
            if not holds:
                raise _unmet(expression, clauses)
            for clause in reversed(clauses):  # the alternative that holds stands behind those that failed
                if not clause.holds:
                    break
                if not clause.known:
                    assumed[clause.text] = None
    return tuple(assumed)


def evaluate(expression: str, subject: Subject) -> tuple[bool, tuple[Clause, ...]]:
    """Whether one expression holds, and every term that was judged on the way. Raises RequestError."""
    clauses: list[Clause] = []
    alternatives = [text for text in expression.split(" ") if text.strip(",")]
    for alternative in alternatives:
        for term in filter(None, alternative.split(",")):
            clauses.append(_judge(term, subject))
            if not clauses[-1].holds:
                break
        else:
            return True, tuple(clauses)
    return not alternatives, tuple(clauses)


def _check_readable(expression: str) -> None:
    for term in expression.replace(" ", ",").split(","):
        if term:
            _judge(term, Subject("0", "0", "0", "none"))


def _unmet(expression: str, clauses: tuple[Clause, ...]) -> RequirementNotMet:
    condition = expression.split(" ")[0]
    failed = [clause for clause in clauses if not clause.holds]
    here = ", ".join(dict.fromkeys(f"{_name(clause.text)}={clause.here}" for clause in failed))
    remedy = ""
    if condition.lower().startswith("cuda>="):
        remedy = "please update your driver to a newer version, or use an earlier cuda container"
    return RequirementNotMet(f"unsatisfied condition: {condition}", seen=f"this node has {here}", remedy=remedy)


def _name(term: str) -> str:
    return term[: _operator_at(term)].lower()


def _operator_at(term: str) -> int:
    return next((i for i, letter in enumerate(term) if letter in "<>=!"), len(term))


def _judge(term: str, subject: Subject) -> Clause:
    start = end = _operator_at(term)
    while end < len(term) and term[end] in "<>=!":
        end += 1
    name, operator, value = term[:start].lower(), term[start:end], term[end:]
    if operator == "!":  # the peer compares over the run's length, so that a lone ! means !=
        operator = "!="
    if name not in ("cuda", "driver", "arch", "brand") or operator not in _HOLDS or not value:
        raise _invalid(term)
    here = getattr(subject, name)
    if name == "brand" and (here is not None or subject.brands):
        return _judge_brand(term, operator, value.lower(), subject)
    if here is None:
        return Clause(term, "", True, known=False)
    ours, theirs = _version(here), _version(value)
    if ours is None or theirs is None:
        raise _invalid(term)
    return Clause(term, here, _HOLDS[operator](ours, theirs))


def _judge_brand(term: str, operator: str, value: str, subject: Subject) -> Clause:
    if operator not in ("=", "!="):
        raise _invalid(term)
    possible = subject.brands if subject.brand is None else (subject.brand,)
    same = value in [brand.lower() for brand in possible]
    known = not same or len(possible) == 1
    return Clause(term, " or ".join(possible), same is (operator == "=") or not known, known)


def _invalid(term: str) -> RequestError:
    return RequestError("invalid expression", seen=term, wanted="cuda, driver, arch or brand, an operator and a value")


def _version(text: str) -> list[int] | None:
    """The numbers of a version without its trailing zeros, so that 12.4.0 equals 12.4; None where it isn't one."""
    if not all(letter in "0123456789." for letter in text) or not text.strip("."):
        return None
    parts = text.split(".")
    if any(len(part) > 18 for part in parts):  # Python refuses to read numbers without end
        return None
    numbers = [int(part or 0) for part in parts]
    while numbers and not numbers[-1]:
        numbers.pop()
    return numbers


_HOLDS = {
    "=": lambda a, b: a == b,
    "!=": lambda a, b: a != b,
    "<": lambda a, b: a < b,
    "<=": lambda a, b: a <= b,
    ">": lambda a, b: a > b,
    ">=": lambda a, b: a >= b,
}

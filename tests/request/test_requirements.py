"""requirements.py: the grammar as a table, and which expressions a container has."""

from __future__ import annotations

import pytest

from gpulet.errors import RequestError, RequirementNotMet
from gpulet.node.gpu import Gpu, NodeFacts
from gpulet.request.requirements import Subject, check, collect, evaluate, subjects
from gpulet.request.trace import Trace
from gpulet.settings import Settings
from support.containers import container

HERE = Subject(cuda="12.4", driver="550.163.01", arch="9.0", brand="Tesla")


@pytest.mark.parametrize(
    ("expression", "holds"),
    [
        ("", True),
        ("   ", True),
        (",", True),
        (" ,, ", True),
        ("cuda>=12.4", True),
        ("cuda>=12.4.0", True),
        ("cuda=12.4.0.0", True),
        ("cuda>=12.4.1", False),
        ("cuda<12.10", True),
        ("cuda!=12.4", False),
        ("cuda!12.5", True),
        ("cuda!12.4", False),
        ("CUDA>=12", True),
        ("cuda<=12", False),
        ("cuda>12", True),
        ("driver=550.163.1", True),
        ("driver>=535,driver<536", False),
        ("cuda>=99 brand=tesla,driver>=535", True),
        ("cuda>=99 brand=geforce,driver>=535", False),
        ("brand=TESLA", True),
        ("brand!=tesla", False),
        ("arch>=7.0,arch<9.1", True),
        ("cuda>=12 foo", True),  # never read
        ("cuda>=99,foo", False),  # never read
        ("cuda>=99 ,cuda>=12,", True),
    ],
)
def test_grammar(expression: str, holds: bool) -> None:
    assert evaluate(expression, HERE)[0] is holds
    if holds:
        check([expression], [HERE])
    else:
        with pytest.raises(RequirementNotMet):
            check([expression], [HERE])


@pytest.mark.parametrize(
    "expression",
    [
        "foo",
        "cuda",
        "cuda>=",
        ">=12",
        "cuda==12",
        "cuda=>12",
        "cuda=<12",
        "cuda>=a",
        "cuda>=12-1",
        "brand>tesla",
        "x=1",
        "cuda>=.",
    ],
)
def test_what_is_no_expression(expression: str) -> None:
    with pytest.raises(RequestError, match="invalid expression"):
        evaluate(expression, HERE)


def test_without_a_device_its_terms_hold() -> None:
    nobody = Subject(cuda="12.4", driver="550.1")
    assert evaluate("arch>=99", nobody)[0]
    assert evaluate("brand>x", nobody)[0]
    assert not evaluate("arch>=99,cuda>=99", nobody)[0]


def test_the_message_names_the_first_alternative_what_is_here_and_what_to_do() -> None:
    with pytest.raises(RequirementNotMet) as caught:
        check(["cuda>=12.8 brand=geforce"], [HERE])
    assert caught.value.what == "unsatisfied condition: cuda>=12.8"
    assert caught.value.seen == "this node has cuda=12.4, brand=Tesla"
    assert caught.value.remedy.startswith("please update your driver")
    with pytest.raises(RequirementNotMet) as caught:
        check(["driver<471"], [HERE])
    assert caught.value.remedy == ""


def test_every_expression_must_hold_for_every_subject() -> None:
    check(["arch>=7", "cuda>=12"], [HERE, HERE.replace(arch="7.0")])
    with pytest.raises(RequirementNotMet, match=r"arch=7\.0"):
        check(["cuda>=12", "arch>=8"], [HERE, HERE.replace(arch="7.0")])
    check(["cuda>=99"], [])


def test_each_term_judged_is_told() -> None:
    _, clauses = evaluate("cuda>=99,arch>=1 driver>=535,brand=tesla", HERE)
    assert [(clause.text, clause.here, clause.holds) for clause in clauses] == [
        ("cuda>=99", "12.4", False),
        ("driver>=535", "550.163.01", True),
        ("brand=tesla", "Tesla", True),
    ]


def collected(*env: str, settings: Settings | None = None) -> tuple[str, ...]:
    return collect(container(*env), settings or Settings(), Trace())


@pytest.mark.parametrize(
    ("env", "wanted"),
    [
        ((), ()),
        (("NVIDIA_REQUIRE_CUDA=cuda>=11.0 x", "NVIDIA_REQUIRE_ARCH=arch>=7"), ("cuda>=11.0 x", "arch>=7")),
        (("NVIDIA_REQUIRE_CUDA=a", "NVIDIA_REQUIRE_CUDA=b"), ("b",)),
        (("NVIDIA_REQUIRE_JETPACK=csv-mounts=all", "NVIDIA_REQUIRE_JETPACK_HOST_MOUNTS=x"), ()),
        (("NVIDIA_REQUIRE_X=a", "NVIDIA_DISABLE_REQUIRE=true"), ()),
        (("NVIDIA_REQUIRE_X=a", "NVIDIA_DISABLE_REQUIRE=1"), ()),
        (("NVIDIA_REQUIRE_X=a", "NVIDIA_DISABLE_REQUIRE=yes"), ("a",)),
        (("CUDA_VERSION=11.0.3",), ("cuda>=11.0",)),
        (("CUDA_VERSION=v12",), ("cuda>=12.0",)),
        (("CUDA_VERSION=10.2.89-1",), ("cuda>=10.2",)),
        (("CUDA_VERSION=11.0.3", "NVIDIA_REQUIRE_CUDA=cuda>=12"), ("cuda>=12",)),
        (("CUDA_VERSION=11.0.3", "NVIDIA_REQUIRE_ARCH=arch>=7"), ("arch>=7", "cuda>=11.0")),
    ],
)
def test_what_a_container_requires(env: tuple[str, ...], wanted: tuple[str, ...]) -> None:
    assert collected(*env) == wanted


@pytest.mark.parametrize("version", ["foo", "9.0.116.50", "9.", "-9", "v"])
def test_a_legacy_image_with_a_version_that_is_none(version: str) -> None:
    with pytest.raises(RequestError, match="CUDA_VERSION"):
        collected(f"CUDA_VERSION={version}")
    assert collected(f"CUDA_VERSION={version}", settings=Settings(disable_require=True)) == ()


@pytest.mark.parametrize(
    ("model", "expression", "outcome"),
    [
        ("NVIDIA GeForce RTX 4090", "brand=tesla", "no"),
        ("NVIDIA GeForce RTX 4090", "brand!=tesla", "yes"),
        ("NVIDIA GeForce RTX 4090", "brand=geforce", "taken"),
        ("NVIDIA GeForce RTX 4090", "brand!=geforce", "taken"),
        ("Quadro RTX 6000", "brand=geforce", "no"),
        ("NVIDIA H100 80GB HBM3", "brand=tesla", "taken"),
        ("NVIDIA GeForce RTX 4090", "cuda>=99 brand=tesla,driver>=535 brand=geforce,driver>=535", "taken"),
        ("NVIDIA GeForce RTX 4090", "cuda>=12.0 brand=geforce", "yes"),
        ("NVIDIA GeForce RTX 4090", "arch>=7.0", "taken"),
    ],
)
def test_a_models_name_says_which_brands_it_may_be(model: str, expression: str, outcome: str) -> None:
    gpu = Gpu(0, 0, "GPU-1", "00000000:19:00.0", name=model)
    node = NodeFacts((gpu,), "procfs", driver="535.129.03", cuda="12.2")
    if outcome == "no":
        with pytest.raises(RequirementNotMet, match=r"brand=geforce or geforcertx|brand=quadro or quadrortx"):
            check([expression], subjects(node))
    else:
        assert bool(check([expression], subjects(node))) is (outcome == "taken")

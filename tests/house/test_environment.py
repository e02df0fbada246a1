"""pyproject.toml, environment.yml and constraints.txt say the same thing.

pyproject.toml is the source. Packages that it asks for on one platform only (a marker) cannot be
in a conda file, which has no markers: one name that a platform lacks makes the file unsolvable
there. environment.yml names them in a comment instead, and that comment is compared too.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

ROOT = Path(__file__).resolve().parents[2]
CONDA_NAMES = {"torch": "pytorch", "build": "python-build"}  # where PyPI and conda-forge differ
UNPINNED = {"triton"}  # a torch wheel for GPUs brings its own


def requirements(pyproject: str) -> list[Requirement]:
    project = tomllib.loads(pyproject)["project"]
    lines = project["dependencies"] + project["optional-dependencies"]["dev"]
    return [Requirement(line) for line in lines]


def conda(environment: str) -> dict[str, SpecifierSet]:
    """{name: range} of environment.yml; a pip section is refused."""
    found = {}
    for line in yaml.safe_load(environment)["dependencies"]:
        assert isinstance(line, str), f"not a conda package: {line}"
        requirement = Requirement(line)
        found[requirement.name] = requirement.specifier
    return found


def differences(pyproject: str, environment: str) -> list[str]:
    theirs = conda(environment)
    ours = {CONDA_NAMES.get(r.name, r.name): r for r in requirements(pyproject)}
    everywhere = {name: r.specifier for name, r in ours.items() if r.marker is None}
    python = SpecifierSet(tomllib.loads(pyproject)["project"]["requires-python"])
    everywhere |= {"python": python, "pip": SpecifierSet()}

    found = [f"{name} is missing from environment.yml" for name in everywhere if name not in theirs]
    found += [f"{name} is in environment.yml only" for name in theirs if name not in everywhere]
    found += [
        f"{name}: {everywhere[name]} in pyproject.toml, {theirs[name]} in environment.yml"
        for name in everywhere.keys() & theirs.keys()
        if everywhere[name] != theirs[name]
    ]
    for name, requirement in ours.items():
        hint = f'conda install -c conda-forge "{name}{requirement.specifier}"'
        if requirement.marker is not None and hint not in environment:
            found.append(f"{name} is for one platform; environment.yml should say: {hint}")
    return found


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def pins() -> dict[str, str]:
    lines = [line.split("#")[0].strip() for line in read("constraints.txt").splitlines()]
    return dict(line.split("==") for line in lines if line)


def test_conda_and_pip_ask_for_the_same() -> None:
    assert differences(read("pyproject.toml"), read("environment.yml")) == []


def test_conda_uses_conda_forge_alone() -> None:
    assert yaml.safe_load(read("environment.yml"))["channels"] == ["conda-forge"]


def test_every_direct_dependency_is_pinned_inside_its_range() -> None:
    for requirement in requirements(read("pyproject.toml")):
        if requirement.name in UNPINNED:
            assert requirement.name not in pins()
        else:
            version = pins().get(requirement.name)
            assert version is not None, f"{requirement.name} is not in constraints.txt"
            assert version in requirement.specifier, f"{requirement}: tested with {version}"


# The comparison bites -------------------------------------------------------------------------

PYPROJECT = """
[project]
requires-python = ">=3.11"
dependencies = ["torch>=2.6,<3", "triton>=3.6; platform_system == 'Linux'"]
[project.optional-dependencies]
dev = ["pytest>=9"]
"""
ENVIRONMENT = """
# conda install -c conda-forge "triton>=3.6"
dependencies: [python>=3.11, pip, "pytorch<3,>=2.6", pytest>=9]
"""


def test_equal_files_pass_whatever_the_order() -> None:
    assert differences(PYPROJECT, ENVIRONMENT) == []


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ("pytest>=9", "pytest>=8", "pytest: >=9 in pyproject.toml, >=8 in environment.yml"),
        (", pytest>=9", "", "pytest is missing"),
        ("pip,", "pip, numpy,", "numpy is in environment.yml only"),
        ("python>=3.11", "python>=3.10", "python: >=3.11"),
        ("pytorch", "torch", "pytorch is missing"),
        ('triton>=3.6"', 'triton>=3.5"', "triton is for one platform"),
    ],
)
def test_a_difference_is_seen(old: str, new: str, complaint: str) -> None:
    assert re.search(re.escape(old), ENVIRONMENT)
    assert differences(PYPROJECT, ENVIRONMENT.replace(old, new))[0].startswith(complaint)

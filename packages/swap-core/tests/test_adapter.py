# SPDX-License-Identifier: Apache-2.0
"""Adapters of distributions that are really installed, in a folder made for the test."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import TypeAlias

import pytest

import swap_core.adapter
from swap_core import ADAPTER_GROUP, UnsupportedOptimizerError, find_adapter

Install: TypeAlias = Callable[..., None]

ADAPTERS = '''
class Adapter:
    """As much of an adapter as looking for one needs."""

    @classmethod
    def matches(cls, optimizer):
        return type(optimizer).__name__ == cls.__name__

    @classmethod
    def supports(cls):
        return f"toy.{cls.__name__}"

class Adam(Adapter): ...
class Lion(Adapter): ...
class Sgd(Adapter): ...
'''


class Adam: ...


class Lion: ...


class Unheard: ...


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Install a distribution with a module and entry points; forget its module afterwards."""
    modules = []

    def installer(name: str, source: str, **entries: str) -> None:
        folder = tmp_path / name
        info = folder / f"{name}-1.0.dist-info"
        info.mkdir(parents=True)
        (folder / f"{name}.py").write_text(source, encoding="utf-8")
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        lines = [f"{entry.replace('__', '.')} = {value}" for entry, value in entries.items()]
        (info / "entry_points.txt").write_text("\n".join([f"[{ADAPTER_GROUP}]", *lines, ""]))
        monkeypatch.syspath_prepend(folder)
        modules.append(name)

    yield installer
    for name in modules:
        sys.modules.pop(name, None)


def test_finds_the_adapter_that_matches(install: Install) -> None:
    install("toy_one", ADAPTERS, toy__adam="toy_one:Adam", toy__lion="toy_one:Lion")
    found = find_adapter(Lion(), "toy")
    assert (found.__module__, found.__name__) == ("toy_one", "Lion")


def test_finds_adapters_of_several_distributions(install: Install) -> None:
    install("toy_one", ADAPTERS, toy__adam="toy_one:Adam")
    install("toy_two", ADAPTERS, toy__lion="toy_two:Lion")
    assert find_adapter(Adam(), "toy").__module__ == "toy_one"
    assert find_adapter(Lion(), "toy").__module__ == "toy_two"


def test_asks_adapters_in_the_order_of_their_names(install: Install) -> None:
    greedy = ADAPTERS + "\nAdam.matches = Lion.matches = classmethod(lambda cls, optimizer: True)\n"
    install("toy_one", greedy, toy__b="toy_one:Adam", toy__a="toy_one:Lion")
    assert find_adapter(Unheard(), "toy").__name__ == "Lion"


def test_imports_only_adapters_of_the_framework_that_asks(install: Install) -> None:
    install("toy_one", ADAPTERS, toy__adam="toy_one:Adam")
    install("game_one", "raise ImportError('no game here')", game__adam="game_one:Adam")
    # A longer name that begins alike is another framework.
    install("toys_one", "raise ImportError('no toys here')", toys__adam="toys_one:Adam")
    assert find_adapter(Adam(), "toy").__module__ == "toy_one"
    assert not {"game_one", "toys_one"} & set(sys.modules)


def test_lists_what_is_supported_when_nothing_matches(install: Install) -> None:
    install("toy_one", ADAPTERS, toy__adam="toy_one:Adam", toy__lion="toy_one:Lion")
    with pytest.raises(UnsupportedOptimizerError) as caught:
        find_adapter(Unheard(), "toy")
    message = str(caught.value)
    assert f"{Unheard.__module__}.Unheard, which is not supported" in message
    assert "Supported: toy.Adam, toy.Lion. " in message
    assert repr(ADAPTER_GROUP) in message
    assert isinstance(caught.value, ValueError)


def test_says_that_no_adapter_is_installed() -> None:
    with pytest.raises(UnsupportedOptimizerError, match=r"Supported: nothing \(none installed\)\."):
        find_adapter(Adam(), "toy")


def test_refuses_two_adapters_of_one_name(install: Install) -> None:
    install("toy_one", ADAPTERS, toy__adam="toy_one:Adam")
    install("toy_two", ADAPTERS, toy__adam="toy_two:Adam")
    with pytest.raises(ValueError, match="Two installed distributions") as caught:
        find_adapter(Adam(), "toy")
    message = str(caught.value)
    for word in ("'toy.adam'", repr(ADAPTER_GROUP), "'toy_one:Adam'", "'toy_two:Adam'"):
        assert word in message
    assert message.endswith("Uninstall one.")


def test_accepts_one_adapter_that_is_registered_twice(install: Install) -> None:
    # As happens where a distribution is installed twice, once of them editable.
    install("toy_one", ADAPTERS, toy__adam="toy_one:Adam")
    install("toy_again", "", toy__adam="toy_one:Adam")
    assert find_adapter(Adam(), "toy").__module__ == "toy_one"


@pytest.mark.parametrize(
    ("source", "cause"),
    [
        ("import a_module_that_is_not_there", ModuleNotFoundError),
        ("raise RuntimeError('driver missing')", RuntimeError),
        ("", AttributeError),
    ],
)
def test_names_the_adapter_that_cannot_be_imported_and_its_distribution(
    install: Install, source: str, cause: type[Exception]
) -> None:
    install("toy_one", source, toy__adam="toy_one:Adam")
    with pytest.raises(ImportError) as caught:
        find_adapter(Adam(), "toy")
    message = str(caught.value)
    for word in ("'toy.adam'", "(toy_one:Adam)", "that toy_one registers"):
        assert word in message
    assert type(caught.value.__cause__) is cause


def test_names_the_group_of_an_adapter_that_cannot_be_imported(install: Install) -> None:
    install("toy_one", "import a_module_that_is_not_there", toy__adam="toy_one:Adam")
    with pytest.raises(ImportError, match=ADAPTER_GROUP) as refusal:
        find_adapter(Adam(), "toy")
    assert "Repair or uninstall" in str(refusal.value)


def test_reports_a_broken_adapter_whose_distribution_is_unknown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    entry = EntryPoint("toy.adam", "a_module_that_is_not_there:Adam", ADAPTER_GROUP)
    monkeypatch.setattr(swap_core.adapter, "entry_points", lambda group: [entry])
    with pytest.raises(
        ImportError, match=r"an unknown distribution registers in .* cannot be imported"
    ):
        find_adapter(Adam(), "toy")

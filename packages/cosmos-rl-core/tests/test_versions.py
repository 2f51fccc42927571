"""Floors of dependencies: the versions that were tested, checked where pip was overruled."""

from importlib import metadata

import pytest

from cosmos_rl_core.launch.versions import too_old

REQUIRES = {"cosmos-rl-core": ["torch>=2.13,<2.15", "numpy>=1.26", "s3fs>=2024.12 ; extra == 's3'", "cosmos-rl-x==0.1"]}


def reader(table):
    def read(name):
        if name not in table:
            raise metadata.PackageNotFoundError(name)
        return table[name]

    return read


@pytest.mark.parametrize(
    ("installed", "old"),
    [
        ({"torch": "2.13.0+cu130", "numpy": "2.3.5"}, []),
        ({"torch": "2.13", "numpy": "2.3.5"}, []),
        ({"torch": "2.9.1+cu128", "numpy": "2.3.5", "s3fs": "2023.1"}, ["s3fs 2023.1", "torch 2.9.1+cu128"]),
        ({}, []),
    ],
)
def test_libraries_below_their_floor_are_named(installed, old):
    found = too_old(requires=reader(REQUIRES), version=reader(installed))
    assert [text.partition(" is installed")[0] for text in found] == old
    assert all(text.partition("pip install ")[2] for text in found)


def test_this_environment_is_as_new_as_the_tests_need():
    assert too_old() == []

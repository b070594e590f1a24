"""Importing the package is cheap, and every public name is reachable and documented."""

from __future__ import annotations

import subprocess
import sys

import pytest

import dcp_objstore as dos
from tests.support.public_api import SAVED, public_api


def test_importing_the_package_imports_neither_torch_nor_a_store_sdk() -> None:
    program = (
        "import sys, dcp_objstore as dos\n"
        "dos.TransferConfig(); dos.errors.CommitLostError\n"
        "heavy = {'torch', 'obstore', 'boto3', 'numpy', 'tqdm'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_every_public_name_resolves_and_has_a_docstring() -> None:
    assert set(dos.__all__) <= set(dir(dos))
    for name in dos.__all__:
        value = getattr(dos, name)
        assert value.__doc__, name


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="svae"):
        dos.svae  # noqa: B018


def test_a_change_of_the_public_api_is_a_change_of_its_file() -> None:
    assert public_api() == SAVED.read_text(), "run `python -m tests.support.public_api`"

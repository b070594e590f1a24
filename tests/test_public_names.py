"""Importing the package is cheap, and every public name is reachable and documented."""

from __future__ import annotations

import inspect
import re
import secrets
import signal
import subprocess
import sys
import textwrap
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import dcp_objstore as dos
from tests.support.campaign import cases
from tests.support.public_api import SAVED, public_api, public_names


def test_importing_the_package_imports_neither_torch_nor_a_store_sdk():
    program = (
        "import sys, dcp_objstore as dos\n"
        "dos.TransferConfig(); dos.errors.CommitLostError\n"
        "heavy = {'torch', 'obstore', 'boto3', 'numpy', 'tqdm'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_every_public_name_resolves_and_has_a_docstring():
    assert set(dos.__all__) <= set(dir(dos))
    for name in dos.__all__:
        value = getattr(dos, name)
        assert value.__doc__, name


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="svae"):
        dos.svae  # noqa: B018


def test_a_change_of_the_public_api_is_a_change_of_its_file():
    assert public_api() == SAVED.read_text(), "run `python -m tests.support.public_api`"


@pytest.mark.parametrize(
    ("call", "target", "others"),
    [
        (dos.save, dos.ObjectStoreWriter, {"url", "on_busy"}),
        (dos.async_save, dos.ObjectStoreWriter, {"url", "on_busy", "progress"}),
        (dos.load, dos.ObjectStoreReader, {"url"}),
        (dos.read_state_dict, dos.open, set()),
    ],
)
def test_a_call_has_each_option_of_what_it_passes_them_to(call, target, others):
    passed, options = inspect.signature(call).parameters, inspect.signature(target).parameters
    for name in options.keys() - others:
        assert str(passed[name]) == str(options[name])


EXAMPLES = {
    name: found[1]
    for module in (dos, dos.measure, dos.observe)
    for name in module.__all__
    if callable(value := getattr(module, name))
    and (found := re.search(r"\A.+?\n\n((?:    [^\n]*\n|\n)+)", f"{inspect.getdoc(value)}\n", re.S))
}


def test_every_public_function_and_class_has_an_example():
    public = {name for module in (dos, dos.measure, dos.observe) for name in public_names(module)}
    modules = {"errors", "reports", "measure", "observe", "events"}
    assert public - modules - EXAMPLES.keys() == {"BenchReport", "Spread", "Throughput"}


@pytest.mark.filterwarnings("ignore:torch.distributed is")
@pytest.mark.parametrize("name", cases(sorted(EXAMPLES), default=EXAMPLES.keys() - {"bench"}))
def test_the_examples_of_the_api_run(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    bucket = f"memory://{secrets.token_hex(4)}"
    model = torch.nn.Linear(3, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    names: dict[str, Any] = {
        "dos": dos,
        "dcp": dcp,
        "signal": signal,
        "torch": torch,
        "model": model,
        "optimizer": optimizer,
        "state": {"model": model},
        "train": lambda state: 0.5,
        "loader": {"position": 3},
        "url": f"{bucket}/run",
        "steps": 2,
        "loss": 0.5,
    }
    for step in (1000, 2000):
        state = {"model": model, "optimizer": optimizer}
        dos.save(state, f"{bucket}/run/step-{step}", progress=False)
    if name == "import_checkpoint":
        dos.export_checkpoint(f"{bucket}/run/step-1000", "weights.safetensors", "model.*")
    text = textwrap.dedent(EXAMPLES[name])
    text = text.replace("s3://bucket", bucket).replace("gs://bucket", f"{bucket}/gs")
    text = re.sub(r"\bdos\.install\(\)", 'dos.install(schemes=["memory"])', text)
    try:
        exec(text, names)
    finally:
        dos.uninstall()

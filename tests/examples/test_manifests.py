"""The manifests of examples/kubernetes and examples/skypilot: what must agree in them does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

yaml = pytest.importorskip("yaml")  # moto brings it

EXAMPLES = Path(__file__).parents[2] / "examples"


def manifests(name: str) -> dict[str, Any]:
    """Return a file's objects by kind."""
    text = (EXAMPLES / "kubernetes" / name).read_text()
    return {one["kind"]: one for one in yaml.safe_load_all(text)}


def gib(quantity: str) -> int:
    assert quantity.endswith("Gi")
    return int(quantity.removesuffix("Gi"))


@pytest.fixture
def jobset() -> dict[str, Any]:
    return manifests("jobset.yaml")["JobSet"]


@pytest.fixture
def pod(jobset: dict[str, Any]) -> dict[str, Any]:
    (job,) = jobset["spec"]["replicatedJobs"]
    pod: dict[str, Any] = job["template"]["spec"]["template"]["spec"]
    return pod


def test_the_pod_lives_longer_after_sigterm_than_torchrun_lets_its_ranks_live(pod):
    (container,) = pod["containers"]
    variables = {one["name"]: one["value"] for one in container["env"]}
    shutdown_seconds = int(variables["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"])
    assert 30 < shutdown_seconds < pod["terminationGracePeriodSeconds"]
    assert container["command"][0] == "torchrun", "a shell does not pass SIGTERM on"


def test_the_ranks_meet_at_the_first_pod_and_are_as_many_as_there_are_gpus(jobset, pod):
    (job,) = jobset["spec"]["replicatedJobs"]
    (container,) = pod["containers"]
    options = dict(part[2:].split("=") for part in container["command"] if part[:2] == "--")
    name = jobset["metadata"]["name"]
    assert options["rdzv-endpoint"].split(":")[0] == f"{name}-{job['name']}-0-0.{name}"
    nodes = job["template"]["spec"]
    assert int(options["nnodes"]) == nodes["parallelism"] == nodes["completions"]
    assert int(options["nproc-per-node"]) == container["resources"]["limits"]["nvidia.com/gpu"]


def test_memory_and_copies_have_room_and_every_volume_is_mounted(pod):
    (container,) = pod["containers"]
    mounts = {one["name"]: one["mountPath"] for one in container["volumeMounts"]}
    volumes = {one["name"]: one for one in pod["volumes"]}
    assert mounts.keys() == volumes.keys()
    in_memory = volumes["shm"]["emptyDir"]
    assert in_memory["medium"] == "Memory"
    assert gib(in_memory["sizeLimit"]) < gib(container["resources"]["limits"]["memory"])
    assert "emptyDir" not in volumes["copies"], "it would go with its pod"
    assert mounts["copies"] == container["command"][-1]


def test_the_job_is_in_the_queue_that_has_what_it_asks_for(jobset, pod):
    kueue = manifests("kueue.yaml")
    queue = kueue["LocalQueue"]
    label = jobset["metadata"]["labels"]["kueue.x-k8s.io/queue-name"]
    assert label == queue["metadata"]["name"]
    cluster = kueue["ClusterQueue"]
    assert queue["spec"]["clusterQueue"] == cluster["metadata"]["name"]
    (group,) = cluster["spec"]["resourceGroups"]
    (flavor,) = group["flavors"]
    assert flavor["name"] == kueue["ResourceFlavor"]["metadata"]["name"]
    quota = {one["name"]: one["nominalQuota"] for one in flavor["resources"]}
    asked = pod["containers"][0]["resources"]["limits"]
    assert asked.keys() == quota.keys() == set(group["coveredResources"])
    assert quota["nvidia.com/gpu"] >= 2 * asked["nvidia.com/gpu"]
    assert gib(quota["memory"]) >= 2 * gib(asked["memory"])


def test_the_service_account_is_the_pods(pod):
    account = manifests("jobset.yaml")["ServiceAccount"]
    assert account["metadata"]["name"] == pod["serviceAccountName"]


def test_skypilot_runs_a_program_that_is_there_with_the_url_it_was_given():
    task = yaml.safe_load((EXAMPLES / "skypilot" / "train.yaml").read_text())
    command = task["run"].split()
    (program,) = [word for word in command if word.endswith(".py")]
    assert (EXAMPLES.parent / program).is_file()
    assert command[command.index(program) + 1] == '"$RUN_URL"'
    assert "RUN_URL" in task["envs"]
    assert "exec" in command, "torchrun gets the signals of its shell"

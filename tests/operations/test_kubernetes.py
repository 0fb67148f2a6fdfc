"""Tests of the manifests in docs/operations: their fields, and the commands in them.

The schemas contain the fields that the manifests may use, with the names, types, and values of the
custom resource definition of KubeRay 1.4 and of Kubernetes 1.33. Unknown fields are errors, so a
new field in a manifest must be looked up and added here.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from tests.cli.conftest import Command, cli

__all__ = ["cli"]

MANIFESTS = Path(__file__).parents[2] / "docs" / "operations"
Schema = dict[str, Any]


def fields(required: str = "", **properties: Schema) -> Schema:
    """Return the schema of an object with these fields and no others."""
    names = required.split()
    return {
        "type": "object",
        "properties": properties,
        "required": names,
        "additionalProperties": False,
    }


def items(schema: Schema) -> Schema:
    return {"type": "array", "items": schema, "minItems": 1}


def one_of(*values: str) -> Schema:
    return {"enum": list(values)}


STRING: Schema = {"type": "string", "minLength": 1}
COUNT: Schema = {"type": "integer", "minimum": 0}
BOOLEAN: Schema = {"type": "boolean"}
STRINGS: Schema = {"type": "object", "additionalProperties": {"type": "string"}}
NAME: Schema = {"type": "string", "pattern": "^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$"}
QUANTITY: Schema = {"type": "string", "pattern": r"^[0-9]+(\.[0-9]+)?(m|[kMGTPE]|[KMGTPE]i)?$"}
QUANTITIES: Schema = {"type": "object", "additionalProperties": QUANTITY}

METADATA = fields("name", name=NAME, namespace=NAME, labels=STRINGS, annotations=STRINGS)
CONTAINER = fields(
    "name image",
    name=NAME,
    image=STRING,
    command=items(STRING),
    args=items(STRING),
    env=items(fields("name", name=STRING, value={"type": "string"})),
    envFrom=items(fields(secretRef=fields("name", name=NAME))),
    resources=fields(requests=QUANTITIES, limits=QUANTITIES),
    lifecycle=fields(preStop=fields("exec", exec=fields("command", command=items(STRING)))),
    volumeMounts=items(fields("name mountPath", name=NAME, mountPath=STRING, readOnly=BOOLEAN)),
)
VOLUME = fields(
    "name",
    name=NAME,
    persistentVolumeClaim=fields("claimName", claimName=NAME),
    emptyDir=fields(medium=one_of("", "Memory"), sizeLimit=QUANTITY),
)
POD = fields(
    "spec",
    metadata=fields(labels=STRINGS, annotations=STRINGS),
    spec=fields(
        "containers",
        restartPolicy=one_of("Always", "OnFailure", "Never"),
        terminationGracePeriodSeconds=COUNT,
        serviceAccountName=NAME,
        nodeSelector=STRINGS,
        containers=items(CONTAINER),
        volumes=items(VOLUME),
    ),
)
HEAD = fields("rayStartParams template", rayStartParams=STRINGS, template=POD)
WORKERS = fields(
    "groupName minReplicas maxReplicas rayStartParams template",
    groupName=NAME,
    replicas=COUNT,
    minReplicas=COUNT,
    maxReplicas=COUNT,
    numOfHosts=COUNT,
    rayStartParams=STRINGS,
    template=POD,
)
RAY_JOB = fields(
    "apiVersion kind metadata spec",
    apiVersion={"const": "ray.io/v1"},
    kind={"const": "RayJob"},
    metadata=METADATA,
    spec=fields(
        "entrypoint rayClusterSpec",
        entrypoint=STRING,
        runtimeEnvYAML=STRING,
        backoffLimit=COUNT,
        activeDeadlineSeconds=COUNT,
        shutdownAfterJobFinishes=BOOLEAN,
        ttlSecondsAfterFinished=COUNT,
        suspend=BOOLEAN,
        submissionMode=one_of("K8sJobMode", "HTTPMode", "InteractiveMode"),
        rayClusterSpec=fields(
            "headGroupSpec",
            rayVersion=STRING,
            enableInTreeAutoscaling=BOOLEAN,
            headGroupSpec=HEAD,
            workerGroupSpecs=items(WORKERS),
        ),
    ),
)
POD_FAILURE_RULE = fields(
    "action",
    action=one_of("Count", "FailIndex", "FailJob", "Ignore"),
    onExitCodes=fields(
        "operator values",
        containerName=NAME,
        operator=one_of("In", "NotIn"),
        values=items({"type": "integer", "minimum": 1, "maximum": 255}),
    ),
    onPodConditions=items(fields("type status", type=STRING, status=one_of("True", "False"))),
)
JOB = fields(
    "apiVersion kind metadata spec",
    apiVersion={"const": "batch/v1"},
    kind={"const": "Job"},
    metadata=METADATA,
    spec=fields(
        "template",
        backoffLimit=COUNT,
        activeDeadlineSeconds=COUNT,
        ttlSecondsAfterFinished=COUNT,
        podFailurePolicy=fields("rules", rules=items(POD_FAILURE_RULE)),
        template=POD,
    ),
)


def load(name: str) -> Any:
    return yaml.safe_load((MANIFESTS / name).read_text())


def pods_of(node: Any) -> list[Any]:
    """Return the pod templates of a manifest."""
    if not isinstance(node, dict):
        return [pod for item in node for pod in pods_of(item)] if isinstance(node, list) else []
    return ([node["template"]] if "template" in node else []) + pods_of(list(node.values()))


@pytest.mark.parametrize(("name", "schema"), [("rayjob.yaml", RAY_JOB), ("job.yaml", JOB)])
def test_manifest_matches_its_schema(name: str, schema: Schema) -> None:
    manifest = load(name)
    jsonschema.Draft202012Validator(schema).validate(manifest)
    pods = [pod["spec"] for pod in pods_of(manifest)]
    assert pods
    for pod in pods:
        volumes = {volume["name"] for volume in pod.get("volumes", ())}
        for container in pod["containers"]:
            mounts = {mount["name"] for mount in container.get("volumeMounts", ())}
            assert mounts == volumes
            assert container["resources"]["requests"] == container["resources"]["limits"]


def test_manifest_schema_rejects_unknown_fields_and_values() -> None:
    manifest = load("rayjob.yaml")
    manifest["spec"]["rayClusterSpec"]["workerGroupSpecs"][0]["replica"] = 2
    manifest["spec"]["backoffLimit"] = "3"
    errors = jsonschema.Draft202012Validator(RAY_JOB).iter_errors(manifest)
    assert {error.validator for error in errors} == {"additionalProperties", "type"}


def test_rayjob_grace_period_covers_the_hook() -> None:
    (_, workers) = pods_of(load("rayjob.yaml"))
    command = workers["spec"]["containers"][0]["lifecycle"]["preStop"]["exec"]["command"][-1]
    limits = {*re.findall(r"deadline-remaining-seconds (\d+)|\{1\.\.(\d+)\}", command)}
    (limit,) = {int(first or second) for first, second in limits}
    assert workers["spec"]["terminationGracePeriodSeconds"] == limit + 30


def test_job_runs_drawbar_launch_with_known_options(cli: Command) -> None:
    (pod,) = pods_of(load("job.yaml"))
    (container,) = pod["spec"]["containers"]
    program, command, *arguments = container["command"] + container["args"]
    assert program == "drawbar"
    shown = cli(command, "--help").out
    options = [argument for argument in arguments if argument.startswith("-")]
    assert [option for option in options if f"{option} " not in shown] == []
    assert load("job.yaml")["spec"]["podFailurePolicy"]["rules"][1]["onExitCodes"]["values"] == [
        2,
        70,
    ]
    script = cli(command, "--nproc-per-node", "1", "/no/such/script.py")
    assert script.code == 2

"""JSON Schema of the objects that `cosmos-rl launch --on kubernetes` creates: the fields in use, and no others.

Written after the API reference of JobSet (jobset.x-k8s.io/v1alpha2) and of Kubernetes (batch/v1, core/v1), with rules
that the admission of JobSet checks beyond its own schema. tests/cluster checks core kinds with published schemas.
"""

from __future__ import annotations

import jsonschema

DNS_LABEL = {"type": "string", "pattern": r"^[a-z]([-a-z0-9]{0,61}[a-z0-9])?$"}
TEXT = {"type": "string"}
TEXTS = {"type": "array", "items": TEXT}
COUNT = {"type": "integer", "minimum": 0}
FLAG = {"type": "boolean"}
FREE = {"type": "object"}


def table(*required, **fields):
    """A table with these fields alone."""
    return {"type": "object", "properties": fields, "required": list(required), "additionalProperties": False}


def items(schema):
    return {"type": "array", "items": schema}


def one_of(*values):
    return {"enum": list(values)}


def as_kind(api, kind, **fields):
    names = ("apiVersion", "kind", "metadata")
    return table(*names, apiVersion=one_of(api), kind=one_of(kind), metadata=METADATA, **fields)


LABELS = {
    "type": "object",
    "propertyNames": {"pattern": r"^([a-z0-9.-]+/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?$"},
    "additionalProperties": {"type": "string", "pattern": r"^([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?$"},
}
METADATA = table("name", name=DNS_LABEL, namespace=DNS_LABEL, labels=LABELS)
PROBE = table(
    "exec",
    exec=table("command", command=TEXTS),
    periodSeconds={"type": "integer", "minimum": 1},
    timeoutSeconds={"type": "integer", "minimum": 1},
    failureThreshold={"type": "integer", "minimum": 1},
)
SECRET_KEY = table("name", "key", name=DNS_LABEL, key=TEXT)
FROM = table(secretKeyRef=SECRET_KEY, fieldRef=table("fieldPath", fieldPath=TEXT))
QUANTITIES = {"type": "object", "additionalProperties": {"type": ["string", "integer"]}}
CONTAINER = table(
    "name",
    "image",
    name=DNS_LABEL,
    image={"type": "string", "minLength": 1},
    command=TEXTS,
    env=items(
        table("name", name={"type": "string", "pattern": r"^[-._a-zA-Z][-._a-zA-Z0-9]*$"}, value=TEXT, valueFrom=FROM)
    ),
    volumeMounts=items(table("name", "mountPath", name=DNS_LABEL, mountPath=TEXT, readOnly=FLAG)),
    resources=table(limits=QUANTITIES, requests=QUANTITIES),
    startupProbe=PROBE,
    livenessProbe=PROBE,
)
VOLUME = table(
    "name",
    name=DNS_LABEL,
    emptyDir=table(medium=one_of("Memory"), sizeLimit=TEXT),
    persistentVolumeClaim=table("claimName", claimName=TEXT),
    configMap=table("name", name=DNS_LABEL),
)
POD = table(
    "restartPolicy",
    "containers",
    restartPolicy=one_of("Never"),  # as podFailurePolicy demands
    terminationGracePeriodSeconds=COUNT,
    containers={**items(CONTAINER), "minItems": 1},
    volumes=items(VOLUME),
    nodeSelector=LABELS,
    tolerations=items(FREE),
    serviceAccountName=DNS_LABEL,
    schedulerName=TEXT,
)
POD_RULE = table(
    "action",
    action=one_of("FailJob", "FailIndex", "Ignore", "Count"),
    onPodConditions=items(table("type", "status", type=TEXT, status=one_of("True", "False", "Unknown"))),
    onExitCodes=table(
        "operator", "values", containerName=DNS_LABEL, operator=one_of("In", "NotIn"), values=items(COUNT)
    ),
)
JOB = table(
    "template",
    completionMode=one_of("Indexed", "NonIndexed"),
    completions=COUNT,
    parallelism=COUNT,
    backoffLimit=COUNT,
    podFailurePolicy=table("rules", rules={**items(POD_RULE), "maxItems": 20}),
    podReplacementPolicy=one_of("Failed"),  # as podFailurePolicy demands
    template=table("spec", metadata=table(labels=LABELS, annotations=FREE), spec=POD),
)
FAILURE_RULE = table(
    "name",
    "action",
    name={"type": "string", "pattern": r"^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$", "maxLength": 128},
    action=one_of(
        "FailJobSet",
        "RestartJobSet",
        "RestartJobSetAndIgnoreMaxRestarts",
        "RestartJob",
        "RestartJobAndIgnoreMaxRestarts",
    ),
    targetReplicatedJobs=items(DNS_LABEL),
    onJobFailureReasons=items(
        one_of(
            "BackoffLimitExceeded", "DeadlineExceeded", "FailedIndexes", "MaxFailedIndexesExceeded", "PodFailurePolicy"
        )
    ),
)
JOB_SET = table(
    "replicatedJobs",
    network=table(enableDNSHostnames=FLAG, subdomain=DNS_LABEL, publishNotReadyAddresses=FLAG),
    successPolicy=table("operator", operator=one_of("All", "Any"), targetReplicatedJobs=items(DNS_LABEL)),
    failurePolicy=table(maxRestarts=COUNT, rules={**items(FAILURE_RULE), "maxItems": 20}),
    replicatedJobs=items(
        table(
            "name",
            "replicas",
            "template",
            name=DNS_LABEL,
            replicas=COUNT,
            template=table("spec", metadata=table(labels=LABELS), spec=JOB),
        )
    ),
)
KINDS = {
    "Secret": as_kind("v1", "Secret", stringData={"type": "object", "additionalProperties": TEXT}),
    "ConfigMap": as_kind("v1", "ConfigMap", data={"type": "object", "additionalProperties": TEXT}),
    "Job": as_kind("batch/v1", "Job", spec=JOB),
    "JobSet": as_kind("jobset.x-k8s.io/v1alpha2", "JobSet", spec=JOB_SET),
}
LONGEST_POD_NAME = 63


def problems(one):
    """Return each violation as a text, with its place."""
    schema = KINDS.get(one.get("kind"))
    if schema is None:
        return [f"unknown kind {one.get('kind')}"]
    found = [
        f"{error.json_path}: {error.message}" for error in jsonschema.Draft202012Validator(schema).iter_errors(one)
    ]
    return found or list(_of_jobset(one))


def _of_jobset(one):
    """Rules across fields, which the admission of JobSet checks."""
    if one["kind"] != "JobSet":
        return
    jobs = {job["name"]: job for job in one["spec"]["replicatedJobs"]}
    policies = [one["spec"].get("successPolicy", {}), *one["spec"].get("failurePolicy", {}).get("rules", ())]
    for name in {name for policy in policies for name in policy.get("targetReplicatedJobs", ())}:
        if name not in jobs:
            yield f"{name} is no replicatedJob"
    for name, job in jobs.items():
        machines = job["template"]["spec"]["completions"]
        last = f"{one['metadata']['name']}-{name}-{job['replicas'] - 1}-{machines - 1}"
        if len(f"{last}-abcde") > LONGEST_POD_NAME:
            yield f"the name {last}-abcde of a pod is too long"

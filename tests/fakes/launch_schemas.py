"""What the custom resources of launch/k8s may hold, for `jsonschema`: no other fields, after the pages of their APIs.

Pod templates inside them are checked by the schemas of Kubernetes itself.
"""

from __future__ import annotations

from typing import Any

Json = dict[str, Any]


def fields(required: str = "", **properties: Json) -> Json:
    """An object of these fields and no others; `required` ones by name, apart by spaces."""
    return {
        "type": "object",
        "properties": properties,
        "required": required.split(),
        "additionalProperties": False,
    }


def one_of(*values: str) -> Json:
    return {"enum": list(values)}


def listed(item: Json, most: int = 64) -> Json:
    return {"type": "array", "items": item, "minItems": 1, "maxItems": most}


NAME = {"type": "string", "pattern": "^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$", "maxLength": 253}
LABELS = {"type": "object", "minProperties": 1, "additionalProperties": {"type": "string", "maxLength": 63}}
METADATA = fields("name", name=NAME, namespace=NAME, labels=LABELS, annotations={"type": "object"})
DIGEST = "^sha256:[0-9a-f]{64}$"
PORT = {"type": "integer", "minimum": 1, "maximum": 65535}
COUNT = {"type": "integer", "minimum": 0}
TEMPLATE = fields("spec", metadata={"type": "object"}, spec={"type": "object", "required": ["containers"]})


def kind(api: str, name: str, spec: Json) -> Json:
    head = {"apiVersion": {"const": api}, "kind": {"const": name}}
    return fields("apiVersion kind metadata spec", **head, metadata=METADATA, spec=spec)


SCHEMAS: dict[str, Json] = {
    "LeaderWorkerSet": kind(
        "leaderworkerset.x-k8s.io/v1",
        "LeaderWorkerSet",
        fields(
            "leaderWorkerTemplate",
            replicas=COUNT,
            startupPolicy=one_of("LeaderCreated", "LeaderReady"),
            rolloutStrategy=fields(
                "type",
                type=one_of("RollingUpdate"),
                rollingUpdateConfiguration=fields(partition=COUNT, maxUnavailable=COUNT, maxSurge=COUNT),
            ),
            leaderWorkerTemplate=fields(
                "workerTemplate",
                leaderTemplate=TEMPLATE,
                workerTemplate=TEMPLATE,
                size={"type": "integer", "minimum": 1},
                restartPolicy=one_of("RecreateGroupOnPodRestart", "None"),
            ),
        ),
    ),
    "InferencePool": kind(
        "inference.networking.k8s.io/v1",
        "InferencePool",
        fields(
            "selector targetPorts endpointPickerRef",
            selector=fields("matchLabels", matchLabels=LABELS),
            targetPorts=listed(fields("number", number=PORT), 8),
            endpointPickerRef=fields(
                "name port",
                name=NAME,
                group={"type": "string"},
                kind={"type": "string"},
                port=fields("number", number=PORT),
                failureMode=one_of("FailOpen", "FailClose"),
            ),
        ),
    ),
    "HTTPRoute": kind(
        "gateway.networking.k8s.io/v1",
        "HTTPRoute",
        fields(
            "parentRefs rules",
            parentRefs=listed(fields("name", group=NAME, kind=one_of("Gateway"), name=NAME)),
            rules=listed(
                fields(
                    "backendRefs",
                    matches=listed(
                        fields(
                            path=fields(
                                "type value",
                                type=one_of("PathPrefix", "Exact"),
                                value={"type": "string", "pattern": "^/"},
                            )
                        )
                    ),
                    backendRefs=listed(fields("name", group=NAME, kind={"type": "string"}, name=NAME, port=PORT)),
                    timeouts=fields(request={"type": "string", "pattern": "^[0-9]+(ms|s|m|h)$"}),
                )
            ),
        ),
    ),
    "Kustomization": fields(
        "apiVersion kind resources",
        apiVersion={"const": "kustomize.config.k8s.io/v1beta1"},
        kind={"const": "Kustomization"},
        resources=listed({"type": "string", "pattern": "[.]yaml$"}),
        images=listed(
            fields(
                "name digest",
                name={"type": "string"},
                newName={"type": "string"},
                digest={"type": "string", "pattern": DIGEST},
            )
        ),
    ),
}

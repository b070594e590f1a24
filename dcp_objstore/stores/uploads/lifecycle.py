"""A bucket's lifecycle rules for unfinished uploads: what they cover, and a rule to add."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

LIFECYCLE_DAYS: Final = 2
_RULE_ID: Final = "dcp-objstore-incomplete-uploads"
_GCS_ACTION: Final = "AbortIncompleteMultipartUpload"


def covering_days(rules: Sequence[Mapping[str, Any]], prefix: str) -> int | None:
    """Return the days after which rules remove unfinished uploads below a prefix; None: never.

    Args:
        rules: the bucket's rules, in the form of S3 or of GCS.
        prefix: a prefix with a slash at its end; empty for the whole bucket.
    """
    days = [rule["condition"]["age"] for rule in rules if _covers_on_gcs(rule, prefix)]
    days += [
        rule["AbortIncompleteMultipartUpload"]["DaysAfterInitiation"]
        for rule in rules
        if rule.get("Status") == "Enabled"
        and "DaysAfterInitiation" in rule.get("AbortIncompleteMultipartUpload", {})
        and prefix.startswith(_rule_prefix(rule))
    ]
    return min(days, default=None)


def _covers_on_gcs(rule: Mapping[str, Any], prefix: str) -> bool:
    """Whether a rule in the form of GCS removes all unfinished uploads below a prefix in time.

    With another condition than age and prefix it does so to some of them.
    """
    condition = rule.get("condition", {})
    if rule.get("action", {}).get("type") != _GCS_ACTION or not isinstance(
        condition.get("age"), int
    ):
        return False
    prefixes = condition.get("matchesPrefix") or [""]
    return condition.keys() <= {"age", "matchesPrefix"} and any(map(prefix.startswith, prefixes))


def _rule_prefix(rule: Mapping[str, Any]) -> str:
    """Return the prefix of an S3 rule, in its old or new form.

    They are in "Elements to describe lifecycle actions".
    """
    scope = rule.get("Filter", {})
    inner = scope.get("And", scope)
    return str(inner.get("Prefix", rule.get("Prefix", "")))


def lifecycle_configuration(
    scheme: str, prefix: str, rules: Sequence[Mapping[str, Any]] = (), days: int = LIFECYCLE_DAYS
) -> str:
    """The lifecycle configuration that removes unfinished uploads below a prefix, as JSON.

    Args:
        scheme: `s3`: for `aws s3api put-bucket-lifecycle-configuration`, which replaces all rules
            of the bucket; `gs`: for `gcloud storage buckets update --lifecycle-file`, as well.
        prefix: a prefix with a slash at its end; empty for the whole bucket.
        rules: the rules that the bucket has, which are kept.
        days: the number of days after the upload was begun. It must be longer than the longest
            save.
    """
    if scheme == "gs":
        condition: dict[str, object] = {"age": days}
        if prefix:
            condition["matchesPrefix"] = [prefix]
        advised = {"action": {"type": _GCS_ACTION}, "condition": condition}
        return json.dumps({"rule": [*(rule for rule in rules if rule != advised), advised]})
    advised = {
        "ID": _RULE_ID,
        "Status": "Enabled",
        "Filter": {"Prefix": prefix},
        "AbortIncompleteMultipartUpload": {"DaysAfterInitiation": days},
    }
    others = [rule for rule in rules if rule.get("ID") != _RULE_ID]
    return json.dumps({"Rules": [*others, advised]}, default=str)

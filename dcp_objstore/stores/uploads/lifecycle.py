"""A bucket's lifecycle rules for unfinished uploads: what they cover, and a rule to add."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

LIFECYCLE_DAYS: Final = 2
_RULE_ID: Final = "dcp-objstore-incomplete-uploads"


def covering_days(rules: Sequence[Mapping[str, Any]], prefix: str) -> int | None:
    """Return the days after which rules remove unfinished uploads below a prefix; None: never.

    Args:
        rules: the bucket's rules, in the form of S3.
        prefix: a prefix with a slash at its end; empty for the whole bucket.
    """
    days = [
        rule["AbortIncompleteMultipartUpload"]["DaysAfterInitiation"]
        for rule in rules
        if rule.get("Status") == "Enabled"
        and "DaysAfterInitiation" in rule.get("AbortIncompleteMultipartUpload", {})
        and prefix.startswith(_rule_prefix(rule))
    ]
    return min(days, default=None)


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
            of the bucket; `gs`: for `gcloud storage buckets update --lifecycle-file`, as well,
            whose other rules are not known here.
        prefix: a prefix with a slash at its end; empty for the whole bucket.
        rules: the rules that the bucket has, which are kept.
        days: the number of days after the upload was begun. It must be longer than the longest
            save.
    """
    if scheme == "gs":
        condition: dict[str, object] = {"age": days}
        if prefix:
            condition["matchesPrefix"] = [prefix]
        advised = {"action": {"type": "AbortIncompleteMultipartUpload"}, "condition": condition}
        return json.dumps({"rule": [advised]})
    advised = {
        "ID": _RULE_ID,
        "Status": "Enabled",
        "Filter": {"Prefix": prefix},
        "AbortIncompleteMultipartUpload": {"DaysAfterInitiation": days},
    }
    others = [rule for rule in rules if rule.get("ID") != _RULE_ID]
    return json.dumps({"Rules": [*others, advised]}, default=str)

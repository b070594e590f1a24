"""An explicit-state model of the commit rules, and what explores all that can happen in it.

Read in this order: `world` (the store and the network), `actors` (requests, rules 5 and 6),
`writers`, `removers`, `sweepers` and `readers` (whose steps carry the numbers of the rules at the
top of `checkpoint/commit.py`), `incremental` and `copies` (saves that do not send everything),
`invariants` (what must never be), `checker` (the search) and `configs` (what is searched, and the
mutants: protocols with one rule weakened). `stage` and `paths` hold the code against the model.
`claim` is a second, separate model, and `claim_sweeper` a part of it.

What is left out: uploads of parts, pins, digests, unfenced stores (rule 11), refusals like 403 of
anything but the marker, and a log that is too short (it holds 16 commits; who is away for longer is
told that his was lost).

    python -m tests.model                    every configuration: states, seconds, verdict
    python -m tests.model --quick            the smaller ones that the tests run
    python -m tests.model --mutant NAME      the shortest trace that shows what NAME breaks
"""

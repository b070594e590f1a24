"""An explicit-state model of the commit rules, and what explores all that can happen in it.

Read in this order: `world` (the store and the network), `writers`, `removers` and `readers` (the
actors, whose steps carry the numbers of the rules at the top of `checkpoint/commit.py`),
`invariants` (what must never be), `checker` (the search) and `configs` (what is searched, and the
mutants: protocols with one rule weakened). `epoch` is a second, separate model.

    python -m tests.model                    every configuration: states, seconds, verdict
    python -m tests.model --quick            the smaller ones that the tests run
    python -m tests.model --mutant NAME      the shortest trace that shows what NAME breaks
"""

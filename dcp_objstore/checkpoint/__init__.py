"""A checkpoint: object names, the index, the marker and the rules of committing it.

Arguments with the same meaning everywhere: `store` is rooted at the checkpoint, `run` at the run;
`clock` has the time, and the deadline of a change.
"""

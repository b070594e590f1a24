"""`dcp-objstore demo`: a job is killed while it saves and resumes, proved step by step.

`story` is the demo from start to end, in the launching process, which does not import torch;
`training` is what a rank does, and `proofs` compares what ranks report.
"""

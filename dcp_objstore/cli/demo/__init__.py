"""`dcp-objstore demo`: a job is killed in mid-save and resumes, proved step by step.

`story` is the course of the demo, in the launching process, which never imports torch; `worker` is
the work of a rank; the other modules serve these two.
"""

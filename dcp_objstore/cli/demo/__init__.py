"""`dcp-objstore demo`: a job is killed in mid-save and resumes, proved step by step.

`story` is what happens, told by the launching process, which never loads torch; `worker` is what a
rank does; the rest serves these two.
"""

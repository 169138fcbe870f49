"""Times parts of a model on this host: cases, timing processes, fits, links.

`profile_host.py` is the way in; it starts `timed_process.py` and fits what comes back.
"""

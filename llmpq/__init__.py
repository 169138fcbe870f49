"""The shared nouns of llmpq: precision, model, cluster, workload, cost model, sensitivity, plan.

Knows nothing of torch, solvers or devices. The rooms (planner, profiler, kernels, runtime) import
these types and meet each other only through the files the types are written to.
"""

from llmpq.version import __version__ as __version__

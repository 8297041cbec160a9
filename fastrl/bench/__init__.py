"""`fastrl bench`: fastrl's paths next to other packages', on the same inputs in one run; Markdown and JSON out.

- command: parses the arguments, runs the suites, writes the files
- suites: the shapes of each suite, and the limits that its workloads are compared with
- workloads, divergence, preference, step: what each suite computes
- candidates: the functions for each kind of workload: fastrl's, plain torch's and the peers'
- peers: other packages, each in a function that raises Unavailable or ImportError if it cannot run
- plain: the losses as a trainer writes them in torch
- problems: inputs, and expected results in float64
- contenders: the definitions of a workload, a contender and its results, and how a function is differentiated
- measure, clock: time, peak temporary memory and error of one contender, and of a suite's
- ceilings, read_ceiling: the highest memory throughput, and the bare matrix products
- machine: machine, versions, commit
- results, report, charts: rows, as Markdown and JSON, and as PNG
- plot_gates: the figure of the gates
"""

from fastrl.bench.command import main

__all__ = ["main"]

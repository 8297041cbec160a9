"""`fastrl bench`: fastrl's paths next to other packages', on the same inputs in one run; Markdown and JSON out.

- command: parses the arguments, runs the suites, writes the files
- suites: the shapes of each suite, and the limits that its workloads are compared with
- running: measures the contenders of one suite at one shape into rows
- workloads, contenders: the definitions of a workload, a section of results, and a contender
- *_workloads, *_workload: what each suite computes, with fastrl, with plain torch and with peers
- heads: from hidden states and the output head to a loss, for all suites that need it
- peers: other packages, each in a function that raises Unavailable or ImportError if it cannot run
- plain: the losses as a trainer writes them in torch
- problems, step_problem: inputs, and expected results in float64
- measure, clock: time, peak temporary memory and error of one contender
- ceilings, read_ceiling: the highest memory throughput
- machine: machine, versions, commit
- report, charts: rows as Markdown and JSON, and as PNG
"""

from fastrl.bench.command import main

__all__ = ["main"]

"""`fastrl bench`: our paths beside other people's, on the same inputs, in one run; Markdown and JSON out.

- command: arguments -> suites -> files
- suites: which shapes are run, and the limits that their workloads are held against
- running: one suite at one shape, its contenders measured into rows
- workloads, contenders: what a workload, a section of results, and one way to do a workload are
- *_workload: what each suite computes, by ours, by plain torch and by peers
- heads: from hidden states and the output head to a loss, for all suites that do that
- peers: other packages, each behind a function that says why it cannot run
- plain: the losses as a trainer writes them in torch
- problems, step_problem: inputs, and float64 answers
- measure, clock: time, peak temporary memory and error of one contender
- ceilings, read_ceiling: what the memory can do at most
- machine: machine, versions, commit
- report, charts: rows -> Markdown and JSON, PNG
"""

from fastrl.bench.command import main

__all__ = ["main"]

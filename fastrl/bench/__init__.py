"""`fastrl bench`: our paths beside other people's, on the same inputs, in one run; Markdown and JSON out.

- command: arguments -> suites -> files
- suites: which shapes are run, and the limits that their works are held against
- works: what a work and a section of results are
- logits_work, linear_work, memory_work, step_work: what each suite computes, by ours, by plain torch and by peers
- heads: from hidden states and the output head to a loss, for all suites that do that
- peers: other packages, each behind a function that says why it cannot run
- plain: the losses as a trainer writes them in torch
- problems, step_problem: inputs, and float64 answers
- measure: time, peak temporary memory and error of one subject
- machine: machine, versions, commit
- report, charts: rows -> Markdown and JSON, PNG
"""

from .command import main

__all__ = ["main"]

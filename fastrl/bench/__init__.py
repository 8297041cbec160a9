"""`fastrl bench`: our paths beside other people's, on the same inputs, in one run; Markdown and JSON out.

- command: arguments -> suites -> files
- suites: which shapes are run, and the limit that their works are held against
- works, logits_work, linear_work: what is computed, by ours, by plain torch and by peers
- peers: other packages, each behind a function that says why it cannot run
- plain: the losses as a trainer writes them in torch
- problems: inputs, and float64 answers
- measure: time, peak temporary memory and error of one subject
- machine: machine, versions, commit
- report: rows -> Markdown, JSON
"""

from .command import main

__all__ = ["main"]

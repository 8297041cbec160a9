"""The report of a run, or of several beside each other: it reads their folders, and needs no torch."""

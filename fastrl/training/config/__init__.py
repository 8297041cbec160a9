"""Every table of every command's config: pydantic models, read from a file and the command line (`settings`)."""

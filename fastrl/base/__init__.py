"""What every other folder may use and knows nothing of them: argument checks, responses, errors, optional packages."""

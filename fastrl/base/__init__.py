"""What every other folder may import, and imports none: argument checks, responses, errors, devices, packages."""

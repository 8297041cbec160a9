"""Which checkpoints a run has."""


def checkpoints(config):
    return sorted(path.name for path in (config.logging.output_dir / "checkpoints").iterdir())

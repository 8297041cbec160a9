"""What a run leaves in its folder."""

import json


def records(config):
    lines = (config.logging.output_dir / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]

"""Work that is spread over processes: groups that agree, vocabulary shards, sums over a group."""

"""The trainer on several processes: `world` says who they are, `shard` lays models over them, `launch` starts them."""

"""What a call costs, without data: its plans, the kernels that it launches, their bytes, operations and times."""

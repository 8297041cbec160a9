"""The ledger of a call: the kernels that it launches, their bytes, operations and modelled times; without data."""

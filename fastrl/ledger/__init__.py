"""The ledger of a call: every kernel that it launches, its bytes and operations, and its modelled time; without data."""

"""The row functions, once per backend: what each implements (contract), and which one runs (choice)."""

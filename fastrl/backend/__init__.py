"""The row functions, once per backend: what each backend implements (`contract`), and which one runs (`choice`)."""

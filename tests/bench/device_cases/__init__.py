"""One module per operation, each with `cases() -> Iterator[Case]` on the current CUDA device."""
